#include "common/comm.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <exception>
#include <iterator>
#include <numeric>
#include <sstream>
#include <utility>

#include "common/device.h"
#include "common/operation_times.h"

namespace lockstep {

// Half a result must not pass for a whole one.
static void refuse_unfinished(bool pending) {
  if (!pending || std::uncaught_exceptions() > 0) return;
  std::fputs("error: an operation was launched and never waited for\n", stderr);
  std::abort();
}

Work& Work::operator=(Work&& other) {
  refuse_unfinished(pending() && this != &other);
  state_ = std::move(other.state_);
  return *this;
}

Work::~Work() { refuse_unfinished(pending()); }

void Work::wait() {
  if (!state_) return;
  std::unique_ptr<State> state = std::move(state_);  // also when wait() throws: it is over
  state->wait();
}

// What the public functions tell launch(): enough for the ledger and for check_calls.
struct Communicator::Call {
  Collective operation;
  int64_t payload = 0;  // bytes, as in ledger.h
  DType dtype = DType::U8;
  int root = -1;
  ReduceOp op = ReduceOp::Sum;
  int64_t wire = -1;                           // -1: wire_bytes(payload)
  int64_t agreed = -1;                         // bytes that all ranks must say; -1: the payload
  std::vector<int> sends = {}, receives = {};  // of an exchange: ranks of this group
  std::vector<Tensor> inputs = {};             // that must not change before wait()

  std::string words() const {
    if (operation == Collective::Barrier) return name_of(operation);
    int64_t size = (agreed >= 0 ? agreed : payload) / int64_t(size_of(dtype));
    return text(name_of(operation), agreed >= 0 ? " with rows of " : " of ", size, " ",
                name_of(dtype), root >= 0 ? text(", root ", root) : "",
                op == ReduceOp::Max ? ", the maximum" : "");
  }
};

Communicator::Communicator(int rank, int size, std::string name, std::vector<int> world_ranks,
                           std::shared_ptr<Ledger> ledger, Options options)
    : rank_(rank),
      size_(size),
      name_(std::move(name)),
      world_ranks_(std::move(world_ranks)),
      ledger_(std::move(ledger)),
      options_(options) {}

static uint64_t checksum(const std::vector<Tensor>& tensors) {
  uint64_t sum = 0xcbf29ce484222325ull;
  for (const Tensor& t : tensors) {
    Tensor host = t.to(Device::CPU, Category::Buffers);
    if (t.device() == Device::CUDA) device::synchronize();
    for (int64_t i = 0; i < host.bytes(); ++i)
      sum = (sum ^ uint64_t(host.raw()[i])) * 0x100000001b3ull;
  }
  return sum;
}

// Debug: looks at the inputs again before it waits.
class CheckedState : public Work::State {
 public:
  CheckedState(std::unique_ptr<Work::State> inner, std::vector<Tensor> inputs, std::string what)
      : inner_(std::move(inner)), inputs_(inputs), what_(what), before_(checksum(inputs_)) {}
  void wait() override {
    bool changed = checksum(inputs_) != before_;
    inner_->wait();
    require(!changed, what_, ": its input changed between launch and wait()");
  }

 private:
  std::unique_ptr<Work::State> inner_;
  std::vector<Tensor> inputs_;
  std::string what_;
  uint64_t before_;
};

Work Communicator::launch(const Call& call, const std::function<Pending()>& start) {
  LedgerEntry entry;
  entry.operation = call.operation;
  entry.group = name_;
  entry.members = world_ranks_;
  entry.payload = call.payload;
  entry.wire = call.wire >= 0 ? call.wire : wire_bytes(call.operation, call.payload, size_);
  entry.root = call.root;
  for (int r : call.sends) entry.sends.push_back(world_ranks_[size_t(r)]);
  for (int r : call.receives) entry.receives.push_back(world_ranks_[size_t(r)]);
  ledger_->write(std::move(entry));

  if (options_.check_calls && call.operation != Collective::Exchange) agree(call.words());
  if (size_ > 1) times_ = start_times(*ledger_);
  Pending pending = start();
  if (times_) pending = measured(std::move(pending), std::exchange(times_, nullptr), *ledger_);
  if (options_.check_buffers && pending && !call.inputs.empty())
    pending = std::make_unique<CheckedState>(std::move(pending), call.inputs,
                                             text(name_of(call.operation), " in \"", name_, "\""));
  return Work(std::move(pending));
}

// Debug: do all ranks mean the same? If not, all of them learn it.
void Communicator::agree(const std::string& mine) {
  if (size_ == 1) return;
  std::vector<std::string> all = exchange_texts("a check of calls", mine);
  for (int r = 0; r < size_; ++r)
    require(all[size_t(r)] == all[0], "ranks of \"", name_,
            "\" do not call the same: rank 0 calls ", all[0], ", rank ", r, " calls ",
            all[size_t(r)]);
}

// Debug: what rank s sends to rank r must be what rank r expects from it.
void Communicator::agree_on_rows(const std::vector<int64_t>& send_rows,
                                 const std::vector<int64_t>& recv_rows) {
  if (size_ == 1) return;
  std::string mine;
  for (const auto* rows : {&send_rows, &recv_rows})
    for (int64_t n : *rows) mine += text(n, " ");
  std::vector<std::vector<int64_t>> counts;  // [rank][to 0, 1, …, from 0, 1, …]
  for (const std::string& theirs : exchange_texts("a check of calls", mine)) {
    std::istringstream in(theirs);
    counts.emplace_back(std::istream_iterator<int64_t>(in), std::istream_iterator<int64_t>());
  }
  for (int s = 0; s < size_; ++s)
    for (int r = 0; r < size_; ++r) {
      int64_t sent = counts[size_t(s)][size_t(r)], expected = counts[size_t(r)][size_t(size_ + s)];
      require(sent == expected, "all_to_all in \"", name_, "\": rank ", s, " sends ", sent,
              " rows to rank ", r, ", which expects ", expected);
    }
}

static void expect_root(int root, int size) {
  require(root >= 0 && root < size, "the root ", root, " is no rank of a group of ", size,
          ": valid are 0 to ", size - 1);
}

static void expect_defined(const char* what, const Tensor& t) {
  require(t.defined(), what, " of an undefined tensor");
}

static bool inside(const Tensor& part, const Tensor& whole) {
  return part.raw() >= whole.raw() && part.raw() < whole.raw() + whole.bytes();
}

// whole must be n times shard; a shard inside of it must be the rank's own part.
static void expect_parts(const Tensor& whole, const Tensor& shard, int n, int rank) {
  require(whole.defined() && shard.defined(), "a whole or a shard is an undefined tensor");
  require(whole.device() == shard.device(), "a whole and its shards must be on one device");
  require(whole.size() == shard.size() * n && whole.dtype() == shard.dtype(), "a whole of ",
          whole.size(), " ", name_of(whole.dtype()), " is not ", n, " shards of ", shard.size(),
          " ", name_of(shard.dtype()));
  require(!inside(shard, whole) || shard.raw() == whole.raw() + rank * shard.bytes(),
          "the shard of rank ", rank, " lies at another place in its whole than behind ", rank,
          " shards");
}

Work Communicator::all_reduce(Tensor buffer, ReduceOp op) {
  expect_defined("all_reduce", buffer);
  return launch({Collective::AllReduce, buffer.bytes(), buffer.dtype(), -1, op},
                [&] { return size_ == 1 ? nullptr : do_all_reduce(buffer, op); });
}

Work Communicator::reduce(Tensor buffer, int root, ReduceOp op) {
  expect_root(root, size_);
  expect_defined("reduce", buffer);
  Call call{Collective::Reduce, buffer.bytes(), buffer.dtype(), root, op};
  if (rank_ != root) call.inputs = {buffer};
  return launch(call, [&] { return size_ == 1 ? nullptr : do_reduce(buffer, root, op); });
}

Work Communicator::broadcast(Tensor buffer, int root) {
  expect_root(root, size_);
  expect_defined("broadcast", buffer);
  Call call{Collective::Broadcast, buffer.bytes(), buffer.dtype(), root};
  if (rank_ == root) call.inputs = {buffer};
  return launch(call, [&] { return size_ == 1 ? nullptr : do_broadcast(buffer, root); });
}

// With one rank the shard is the whole: a copy, or nothing where they share memory.
static void copy_unless_same(const Tensor& to, const Tensor& from) {
  if (to.raw() != from.raw()) copy(to, from);
}

Work Communicator::all_gather(const Tensor& shard, Tensor whole) {
  expect_parts(whole, shard, size_, rank_);
  Call call{Collective::AllGather, whole.bytes(), whole.dtype()};
  call.inputs = {shard};
  return launch(call, [&]() -> Pending {
    if (size_ > 1) return do_all_gather(shard, whole);
    copy_unless_same(whole, shard);
    return nullptr;
  });
}

Work Communicator::reduce_scatter(const Tensor& whole, Tensor shard, ReduceOp op) {
  expect_parts(whole, shard, size_, rank_);
  Call call{Collective::ReduceScatter, whole.bytes(), whole.dtype(), -1, op};
  if (!inside(shard, whole)) call.inputs = {whole};
  return launch(call, [&]() -> Pending {
    if (size_ > 1) return do_reduce_scatter(whole, shard, op);
    copy_unless_same(shard, whole);
    return nullptr;
  });
}

Work Communicator::gather(const Tensor& shard, Tensor whole, int root) {
  expect_root(root, size_);
  expect_defined("gather", shard);
  if (rank_ == root) expect_parts(whole, shard, size_, rank_);
  Call call{Collective::Gather, shard.bytes() * size_, shard.dtype(), root};
  call.inputs = {shard};
  return launch(call, [&]() -> Pending {
    if (size_ > 1) return do_gather(shard, whole, root);
    copy_unless_same(whole, shard);
    return nullptr;
  });
}

Work Communicator::scatter(const Tensor& whole, Tensor shard, int root) {
  expect_root(root, size_);
  expect_defined("scatter", shard);
  if (rank_ == root) expect_parts(whole, shard, size_, rank_);
  Call call{Collective::Scatter, shard.bytes() * size_, shard.dtype(), root};
  if (rank_ == root) call.inputs = {whole};
  return launch(call, [&]() -> Pending {
    if (size_ > 1) return do_scatter(whole, shard, root);
    copy_unless_same(shard, whole);
    return nullptr;
  });
}

Work Communicator::all_to_all(const Tensor& send, const std::vector<int64_t>& send_rows,
                              Tensor recv, const std::vector<int64_t>& recv_rows) {
  auto sum = [](const std::vector<int64_t>& rows) {
    return std::accumulate(rows.begin(), rows.end(), int64_t(0));
  };
  require(int(send_rows.size()) == size_ && int(recv_rows.size()) == size_, "an all_to_all among ",
          size_, " ranks needs as many row counts, not ", send_rows.size(), " and ",
          recv_rows.size());
  require(sum(send_rows) == send.dim(0) && sum(recv_rows) == recv.dim(0),
          "the row counts add up to ", sum(send_rows), " and ", sum(recv_rows),
          ", the tensors have ", send.dim(0), " and ", recv.dim(0), " rows");
  auto row_bytes = [](const Tensor& t) {
    return elements(Shape(t.shape().begin() + 1, t.shape().end())) * int64_t(size_of(t.dtype()));
  };
  require(send.dtype() == recv.dtype() && row_bytes(send) == row_bytes(recv),
          "an all_to_all from rows of ", row_bytes(send), " bytes of ", name_of(send.dtype()),
          " to rows of ", row_bytes(recv), " bytes of ", name_of(recv.dtype()));
  for (const auto* rows : {&send_rows, &recv_rows})
    for (int64_t n : *rows) require(n >= 0, "an all_to_all of ", n, " rows");
  require(!inside(send, recv) && !inside(recv, send), "an all_to_all cannot be done in place");
  Call call{Collective::AllToAll, send.bytes(), send.dtype()};
  call.wire = row_bytes(send) * (send.dim(0) - send_rows[size_t(rank_)]);
  call.agreed = row_bytes(send);
  call.inputs = {send};
  return launch(call, [&]() -> Pending {
    if (options_.check_calls) agree_on_rows(send_rows, recv_rows);
    if (size_ > 1) return do_all_to_all(send, send_rows, recv, recv_rows);
    copy(recv, send);
    return nullptr;
  });
}

Work Communicator::exchange(std::vector<P2P> messages) {
  Call call{Collective::Exchange};
  call.wire = 0;
  for (const P2P& m : messages) {
    require(m.peer >= 0 && m.peer < size_ && m.peer != rank_, "rank ", rank_,
            " cannot exchange with ", m.peer, " in a group of ", size_,
            ": a peer is another rank of the group");
    expect_defined("exchange", m.buffer);
    bool sends = m.kind == P2P::Send;
    (sends ? call.sends : call.receives).push_back(m.peer);
    if (!sends) continue;
    call.payload += m.buffer.bytes();
    call.wire += m.buffer.bytes();
    call.inputs.push_back(m.buffer);
  }
  return launch(call, [&] { return messages.empty() ? nullptr : do_exchange(messages); });
}

void Communicator::barrier() {
  launch({Collective::Barrier}, [&]() -> Pending {
    if (size_ > 1) do_barrier();
    return nullptr;
  });
}

std::vector<std::string> Communicator::gather_texts(const std::string& mine) {
  if (size_ == 1) return {mine};
  return exchange_texts("texts", mine);
}

std::unique_ptr<Communicator> Communicator::split(int color, int key, const std::string& name) {
  require(color >= 0, "a group cannot have the color ", color, ": 0 or more is valid");
  if (options_.check_calls) agree("split");
  return do_split(members_of(color, key), name);
}

Communicator::Members Communicator::members_of(int color, int key) {
  std::vector<std::string> all = exchange_texts("split", text(color, " ", key));
  std::vector<std::pair<int, int>> found;  // key, rank
  for (int r = 0; r < size_; ++r) {
    std::istringstream words(all[size_t(r)]);
    int their_color, their_key;
    words >> their_color >> their_key;
    if (their_color == color) found.emplace_back(their_key, r);
  }
  std::sort(found.begin(), found.end());
  Members members{color, 0, {}};
  for (auto [_, r] : found) {
    if (r == rank_) members.mine = int(members.world_ranks.size());
    members.world_ranks.push_back(world_ranks_[size_t(r)]);
  }
  return members;
}

}  // namespace lockstep
