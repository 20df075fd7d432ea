// The communicator of ranks that are processes. Every operation is a few stages of messages for the
// engine (mpi_engine.h). Nothing here calls one of MPI's collectives or its MPI_SUM: sums add in
// rank order, so that their bits equal those of ranks that are threads, and MPI knows neither bf16
// nor fp16. What lives on a GPU is copied to the host and back.

#include "common/comm_mpi.h"

#include <algorithm>
#include <numeric>

#include "common/device.h"
#include "common/mpi_engine.h"
#include "common/reduce.h"

namespace lockstep {

// Where a buffer of an operation is, on the host and for the caller.
struct Staged {
  Tensor host, original;
};

class MpiCommunicator : public Communicator {
 public:
  MpiCommunicator(MpiEngine& engine, MPI_Comm comm, int64_t piece, int rank, std::string name,
                  std::vector<int> world_ranks, std::shared_ptr<Ledger> ledger, Options options)
      : Communicator(rank, int(world_ranks.size()), std::move(name), world_ranks, std::move(ledger),
                     options),
        engine_(engine),
        comm_(comm),
        piece_(piece) {}
  const char* backend() const override { return "mpi"; }

 protected:
  Pending do_all_reduce(const Tensor& buffer, ReduceOp) override;
  Pending do_reduce(const Tensor& buffer, int root, ReduceOp) override;
  Pending do_broadcast(const Tensor& buffer, int root) override;
  Pending do_all_gather(const Tensor& shard, const Tensor& whole) override;
  Pending do_reduce_scatter(const Tensor& whole, const Tensor& shard, ReduceOp) override;
  Pending do_gather(const Tensor& shard, const Tensor& whole, int root) override;
  Pending do_scatter(const Tensor& whole, const Tensor& shard, int root) override;
  Pending do_all_to_all(const Tensor& send, const std::vector<int64_t>& send_rows,
                        const Tensor& recv, const std::vector<int64_t>& recv_rows) override;
  Pending do_exchange(const std::vector<P2P>& messages) override;
  void do_barrier() override;
  std::unique_ptr<Communicator> do_split(const Members&, const std::string& name) override;
  std::vector<std::string> exchange_texts(std::string_view what, const std::string& mine) override;

 private:
  Pending start(std::string_view what, std::vector<MessageStage> stages,
                std::vector<Staged> results = {});
  Pending launch(std::string name, int tag, std::vector<MessageStage> stages,
                 std::vector<Staged> results);
  Tensor chunk(const Tensor& whole, int r) const;
  MessageStage sum_my_chunk(const Tensor& whole, const Tensor& to, ReduceOp op) const;
  MessageStage give_to_all(const Tensor& mine, const Tensor& whole) const;
  MessageStage give_to_root(const Tensor& mine, const Tensor& whole, int root) const;

  MpiEngine& engine_;
  MPI_Comm comm_;  // this group's own, so that numbers of operations are tags enough
  int64_t piece_;
  int64_t calls_ = 0, exchanges_ = 0;
};

// The launched operation as its rank holds it.
class MpiWork : public Work::State {
 public:
  MpiWork(MpiEngine& engine, std::shared_ptr<Operation> operation, double limit,
          std::vector<Staged> results)
      : engine_(engine), operation_(std::move(operation)), limit_(limit), results_(results) {}
  void wait() override {
    engine_.wait(*operation_, limit_);
    for (const Staged& s : results_)
      if (s.host.raw() != s.original.raw()) copy(s.original, s.host);
  }

 private:
  MpiEngine& engine_;
  std::shared_ptr<Operation> operation_;
  double limit_;
  std::vector<Staged> results_;
};

static Tensor to_host(const Tensor& t) {
  if (!t.defined() || t.device() == Device::CPU) return t;
  Tensor host = t.to(Device::CPU, Category::Buffers);
  device::synchronize();  // MPI reads it without looking at streams
  return host;
}

static Tensor host_memory(Shape shape, DType dtype) {
  return Tensor::empty(std::move(shape), dtype, Device::CPU, Category::Buffers);
}

// A place on the host for what wait() puts into t; its values are there if the operation needs
// them.
static Staged result(const Tensor& t) {
  bool on_host = t.device() == Device::CPU;
  return {on_host ? t : host_memory(t.shape(), t.dtype()), t};
}
static Staged result_with_values(const Tensor& t) { return {to_host(t), t}; }

static void copy_unless_same(const Tensor& to, const Tensor& from) {
  if (to.raw() != from.raw()) copy(to, from);
}

Communicator::Pending MpiCommunicator::launch(std::string name, int tag,
                                              std::vector<MessageStage> stages,
                                              std::vector<Staged> results) {
  auto operation = std::make_shared<Operation>();
  operation->name = std::move(name);
  operation->world_ranks = world_ranks();
  operation->comm = comm_;
  operation->tag = tag;
  operation->piece = piece_;
  operation->stages = std::move(stages);
  operation->times = times();
  if (times()) times()->under_way.emplace().start(Device::CPU);
  engine_.start(operation);
  return std::make_unique<MpiWork>(engine_, operation, options().time_limit, std::move(results));
}

// A collective. Later ones may overtake it between their stages, so each has a tag of its own, up
// to the 32767 that every MPI must allow; tag 0 is exchange()'s.
Communicator::Pending MpiCommunicator::start(std::string_view what,
                                             std::vector<MessageStage> stages,
                                             std::vector<Staged> results) {
  int64_t number = calls_++;
  return launch(text(what, " (number ", number, " in \"", name(), "\")"), 1 + int(number % 32767),
                std::move(stages), std::move(results));
}

// Part r of size() parts that differ by one element at most.
Tensor MpiCommunicator::chunk(const Tensor& whole, int r) const {
  int64_t first = whole.size() * r / size(), end = whole.size() * (r + 1) / size();
  return whole.flat(first, end - first);
}

// Everyone sends me its values of my chunk; `to` becomes their sum. It may be my chunk itself.
MessageStage MpiCommunicator::sum_my_chunk(const Tensor& whole, const Tensor& to,
                                           ReduceOp op) const {
  MessageStage stage;
  std::vector<Tensor> parts;
  for (int r = 0; r < size(); ++r) {
    parts.push_back(r == rank() ? chunk(whole, r) : host_memory({to.size()}, to.dtype()));
    if (r == rank()) continue;
    stage.receives.push_back({r, parts.back()});
    stage.sends.push_back({r, chunk(whole, r)});
  }
  stage.then = [to, parts, op] { reduce_in_rank_order(to, parts, op); };
  return stage;
}

MessageStage MpiCommunicator::give_to_all(const Tensor& mine, const Tensor& whole) const {
  MessageStage stage;
  for (int r = 0; r < size(); ++r) {
    if (r == rank()) continue;
    stage.receives.push_back({r, chunk(whole, r)});
    stage.sends.push_back({r, mine});
  }
  return stage;
}

// whole is used on the root only.
MessageStage MpiCommunicator::give_to_root(const Tensor& mine, const Tensor& whole,
                                           int root) const {
  if (rank() != root) return {.sends = {{root, mine}}};
  MessageStage stage;
  for (int r = 0; r < size(); ++r)
    if (r != root) stage.receives.push_back({r, chunk(whole, r)});
  return stage;
}

Communicator::Pending MpiCommunicator::do_all_reduce(const Tensor& buffer, ReduceOp op) {
  Staged all = result_with_values(buffer);
  Tensor mine = chunk(all.host, rank());
  return start("all_reduce", {sum_my_chunk(all.host, mine, op), give_to_all(mine, all.host)},
               {all});
}

Communicator::Pending MpiCommunicator::do_reduce(const Tensor& buffer, int root, ReduceOp op) {
  Staged all = result_with_values(buffer);
  Tensor mine = chunk(all.host, rank());
  if (rank() != root) mine = host_memory({mine.size()}, mine.dtype());  // its buffer stays
  std::vector<MessageStage> stages = {sum_my_chunk(all.host, mine, op),
                                      give_to_root(mine, all.host, root)};
  if (rank() != root) return start("reduce", std::move(stages));
  return start("reduce", std::move(stages), {all});
}

Communicator::Pending MpiCommunicator::do_broadcast(const Tensor& buffer, int root) {
  if (rank() != root) {
    Staged all = result(buffer);
    return start("broadcast", {{.receives = {{root, all.host}}}}, {all});
  }
  MessageStage stage;
  Tensor host = to_host(buffer);
  for (int r = 0; r < size(); ++r)
    if (r != root) stage.sends.push_back({r, host});
  return start("broadcast", {stage});
}

Communicator::Pending MpiCommunicator::do_all_gather(const Tensor& shard, const Tensor& whole) {
  Staged all = result(whole);
  Tensor mine = chunk(all.host, rank());
  copy_unless_same(mine, to_host(shard));
  return start("all_gather", {give_to_all(mine, all.host)}, {all});
}

Communicator::Pending MpiCommunicator::do_reduce_scatter(const Tensor& whole, const Tensor& shard,
                                                         ReduceOp op) {
  Staged mine = result(shard);
  return start("reduce_scatter", {sum_my_chunk(to_host(whole), mine.host, op)}, {mine});
}

Communicator::Pending MpiCommunicator::do_gather(const Tensor& shard, const Tensor& whole,
                                                 int root) {
  if (rank() != root) return start("gather", {give_to_root(to_host(shard), {}, root)});
  Staged all = result(whole);
  copy_unless_same(chunk(all.host, root), to_host(shard));
  return start("gather", {give_to_root({}, all.host, root)}, {all});
}

Communicator::Pending MpiCommunicator::do_scatter(const Tensor& whole, const Tensor& shard,
                                                  int root) {
  Staged mine = result(shard);
  if (rank() != root) return start("scatter", {{.receives = {{root, mine.host}}}}, {mine});
  MessageStage stage;
  Tensor host = to_host(whole);
  for (int r = 0; r < size(); ++r)
    if (r != root) stage.sends.push_back({r, chunk(host, r)});
  copy_unless_same(mine.host, chunk(host, root));
  return start("scatter", {stage}, {mine});
}

Communicator::Pending MpiCommunicator::do_all_to_all(const Tensor& send,
                                                     const std::vector<int64_t>& send_rows,
                                                     const Tensor& recv,
                                                     const std::vector<int64_t>& recv_rows) {
  Staged in = result(recv);
  Tensor out = to_host(send);
  MessageStage stage;
  int64_t out_row = 0, in_row = 0;
  for (int r = 0; r < size(); ++r) {
    int64_t leaving = send_rows[size_t(r)], coming = recv_rows[size_t(r)];
    Tensor to = in.host.rows(in_row, coming), from = out.rows(out_row, leaving);
    out_row += leaving;
    in_row += coming;
    if (r != rank()) {
      stage.receives.push_back({r, to});
      stage.sends.push_back({r, from});
      continue;
    }
    require(leaving == coming, "sends ", leaving, " rows to itself and expects ", coming);
    copy(to, from);
  }
  return start("all_to_all", {stage}, {in});
}

// Between two ranks MPI delivers in posting order what has the same tag.
Communicator::Pending MpiCommunicator::do_exchange(const std::vector<P2P>& messages) {
  MessageStage stage;
  std::vector<Staged> results;
  for (const P2P& m : messages) {
    if (m.kind == P2P::Send) {
      stage.sends.push_back({m.peer, to_host(m.buffer)});
    } else {
      results.push_back(result(m.buffer));
      stage.receives.push_back({m.peer, results.back().host});
    }
  }
  return launch(text("exchange (number ", exchanges_++, " in \"", name(), "\")"), 0, {stage},
                std::move(results));
}

void MpiCommunicator::do_barrier() {
  MessageStage stage;
  for (int r = 0; r < size(); ++r) {
    if (r == rank()) continue;
    stage.receives.push_back({r, {}});
    stage.sends.push_back({r, {}});
  }
  start("barrier", {stage})->wait();
}

// First how long the texts are, then the texts.
std::vector<std::string> MpiCommunicator::exchange_texts(std::string_view what,
                                                         const std::string& mine) {
  Tensor lengths = host_memory({size()}, DType::I64), my_length = chunk(lengths, rank());
  *my_length.data<int64_t>() = int64_t(mine.size());
  start(what, {give_to_all(my_length, lengths)})->wait();

  std::vector<int64_t> length = lengths.values<int64_t>();
  Tensor words = host_memory({int64_t(mine.size())}, DType::U8);
  std::copy(mine.begin(), mine.end(), words.data<uint8_t>());
  std::vector<Tensor> theirs;
  MessageStage stage;
  for (int r = 0; r < size(); ++r) {
    theirs.push_back(r == rank() ? words : host_memory({length[size_t(r)]}, DType::U8));
    if (r == rank()) continue;
    stage.receives.push_back({r, theirs.back()});
    stage.sends.push_back({r, words});
  }
  start(what, {stage})->wait();

  std::vector<std::string> all;
  for (const Tensor& t : theirs) all.emplace_back(t.data<uint8_t>(), t.data<uint8_t>() + t.size());
  return all;
}

std::unique_ptr<Communicator> MpiCommunicator::do_split(const Members& members,
                                                        const std::string& group) {
  // MPI_Comm_split blocks, so that no stage moves on meanwhile. That is safe now that all ranks
  // have said who they are: every one is on its way into it.
  // Never freed: MPI_Comm_free may wait for the other ranks, which destroy theirs when they like.
  MPI_Comm made = MPI_COMM_NULL;
  bool had_its_turn = engine_.call(options().time_limit, [&] {
    check_mpi(MPI_Comm_split(comm_, members.color, members.mine, &made));
    check_mpi(MPI_Comm_set_errhandler(made, MPI_ERRORS_RETURN));
  });
  require(had_its_turn, "waited ", options().time_limit, " s to split \"", name(), "\"");
  return std::make_unique<MpiCommunicator>(engine_, made, piece_, members.mine, group,
                                           members.world_ranks, shared_ledger(), options());
}

std::unique_ptr<Communicator> make_mpi_world(MpiEngine& engine, MPI_Comm comm, int64_t piece,
                                             int rank, int size, Communicator::Options options) {
  std::vector<int> ranks(size_t(size), 0);
  std::iota(ranks.begin(), ranks.end(), 0);
  return std::make_unique<MpiCommunicator>(engine, comm, piece, rank, "world", ranks,
                                           std::make_shared<Ledger>(), options);
}

}  // namespace lockstep
