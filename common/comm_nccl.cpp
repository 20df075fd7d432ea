#include "common/comm_nccl.h"

#include <cstdlib>
#include <exception>

#include "common/comm_copies.h"
#include "common/comm_nccl_watch.h"
#include "common/device.h"
#include "common/device_cuda.h"
#include "common/operation_times.h"

namespace lockstep {

// Of elements that are added. What is only moved, is moved as bytes.
static ncclDataType_t nccl_type(DType t) {
  switch (t) {
    case DType::F64: return ncclFloat64;
    case DType::F32: return ncclFloat32;
    case DType::BF16: return ncclBfloat16;
    case DType::F16: return ncclFloat16;
    case DType::I64: return ncclInt64;
    case DType::I32: return ncclInt32;
    case DType::U8: return ncclUint8;
    case DType::U16: break;
  }
  fail(text("NCCL can move ", name_of(t), ", but not reduce it: convert it to I32 first"));
}

static ncclRedOp_t nccl_op(ReduceOp op) { return op == ReduceOp::Sum ? ncclSum : ncclMax; }

class NcclState : public Work::State {
 public:
  NcclState(std::shared_ptr<NcclOperation> operation, std::vector<Tensor> buffers)
      : operation_(std::move(operation)), buffers_(std::move(buffers)) {}
  // The buffers go back to the rank's stream, which must not give them to anyone before. A failing
  // call means that the GPU is lost, which the next check() reports.
  ~NcclState() override {
    if (!waited_) cudaStreamWaitEvent(device::stream(), operation_->done.event());
  }
  void wait() override {
    operation_->done.block(device::stream());
    waited_ = true;
  }

 private:
  std::shared_ptr<NcclOperation> operation_;
  std::vector<Tensor> buffers_;
  bool waited_ = false;
};

class NcclCommunicator : public Communicator {
 public:
  NcclCommunicator(int rank, std::string name, std::vector<int> world_ranks,
                   std::shared_ptr<Ledger> ledger, Options options,
                   std::shared_ptr<NcclWatch> watch, std::shared_ptr<NcclWatch::Group> group);
  ~NcclCommunicator() override;
  const char* backend() const override { return "nccl"; }
  void connect() override;

  // Opens the group that the watch will know as `name` and lets `start` make NCCL's part of it.
  static std::shared_ptr<NcclWatch::Group> start(NcclWatch& watch, int world_rank,
                                                 const std::string& name, double time_limit,
                                                 const std::function<void(ncclComm_t*)>& start);

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
  void end() noexcept;
  CopyEngines* copies_for(const Tensor& largest);
  // Enqueues what `call` enqueues in the communicator's stream, between ready and done.
  Pending enqueue(const char* what, std::vector<Tensor> buffers, const std::function<void()>& call);
  // Messages posted together: NCCL's as one kernel. It matches those between two ranks in posting
  // order, as inboxes do. Parts without elements are left out on both sides.
  Pending post(const char* what, std::vector<Tensor> buffers, const std::vector<P2P>& messages);

  std::shared_ptr<NcclWatch> watch_;
  std::shared_ptr<NcclWatch::Group> group_;
  ncclComm_t comm_;
  cudaStream_t stream_;
  std::unique_ptr<CopyEngines> copies_;
  bool connected_ = false, telling_ = false;
};

// ---- Beginning and end ----

NcclCommunicator::NcclCommunicator(int rank, std::string name, std::vector<int> world_ranks,
                                   std::shared_ptr<Ledger> ledger, Options options,
                                   std::shared_ptr<NcclWatch> watch,
                                   std::shared_ptr<NcclWatch::Group> group)
    : Communicator(rank, int(world_ranks.size()), std::move(name), world_ranks, std::move(ledger),
                   options),
      watch_(std::move(watch)),
      group_(std::move(group)),
      comm_(group_->comm),
      stream_(stream_of_messages()) {}

NcclCommunicator::~NcclCommunicator() {
  // While an exception ends the program, the other ranks may never come to what is still enqueued.
  // Nothing here may wait for them then; the operating system tidies up.
  if (std::uncaught_exceptions() == 0) end();
  watch_->close(group_);
}

void NcclCommunicator::end() noexcept try {
  cudaStreamSynchronize(stream_);
  if (copies_) copies_->close([this](auto& mine) { return exchange_texts("the end", mine); });
  watch_->set_comm(*group_, nullptr);
  watch_->block(*group_, "the end of the group", [&] { ncclCommDestroy(comm_); });
  cudaStreamDestroy(stream_);
} catch (const Error&) {
  // The GPU is lost. Whoever asks it for something next reports that.
}

std::shared_ptr<NcclWatch::Group> NcclCommunicator::start(
    NcclWatch& watch, int world_rank, const std::string& name, double time_limit,
    const std::function<void(ncclComm_t*)>& start) {
  auto group = watch.open(text("rank ", world_rank), name, time_limit);
  ncclComm_t comm = nullptr;
  watch.block(*group, "the start of the group", [&] { start(&comm); });
  watch.set_comm(*group, comm);
  return group;
}

std::unique_ptr<Communicator> make_nccl_world(
    int rank, int size, const std::function<void(void*, size_t)>& broadcast_from_rank_0,
    std::shared_ptr<Ledger> ledger, Communicator::Options options) {
  require(device::available(), "NCCL needs a GPU: ", device::why_not());
  // Kernels of several groups that ran in another order here than there could wait for each other
  // for ever. NCCL (2.26 and later) keeps them in the order of their launches if it is asked to.
  setenv("NCCL_LAUNCH_ORDER_IMPLICIT", "1", 0);
  // What a graph captures it would share between processes, which pool memory cannot be.
  setenv("NCCL_GRAPH_REGISTER", "0", 0);
  ncclUniqueId id{};
  if (rank == 0) check(ncclGetUniqueId(&id));
  broadcast_from_rank_0(&id, sizeof(id));
  auto watch = std::make_shared<NcclWatch>();
  auto group = NcclCommunicator::start(
      *watch, rank, "world", options.time_limit,
      [&](ncclComm_t* comm) { check(ncclCommInitRank(comm, size, id, rank)); });
  std::vector<int> ranks;
  for (int r = 0; r < size; ++r) ranks.push_back(r);
  return std::make_unique<NcclCommunicator>(rank, "world", ranks, std::move(ledger), options, watch,
                                            group);
}

std::unique_ptr<Communicator> NcclCommunicator::do_split(const Members& members,
                                                         const std::string& name) {
  // NCCL may hang when a group is split that has operations under way. Ranks have just agreed on
  // the split, and in doing so waited for all of them.
  auto group = start(*watch_, members.world_ranks[size_t(members.mine)], name, options().time_limit,
                     [&](ncclComm_t* comm) {
                       std::lock_guard in_nccl(group_->in_nccl);
                       check(ncclCommSplit(comm_, members.color, members.mine, comm, nullptr));
                     });
  return std::make_unique<NcclCommunicator>(members.mine, name, members.world_ranks,
                                            shared_ledger(), options(), watch_, group);
}

// ---- Operations ----

static void under_way_begins(OperationTimes& times, cudaStream_t stream) {
  Stretch& way = times.under_way.emplace();
  way.in_stream = std::make_shared<device::TimedPair>();
  way.in_stream->begin.record_in(stream);
}

Communicator::Pending NcclCommunicator::enqueue(const char* what, std::vector<Tensor> buffers,
                                                const std::function<void()>& call) {
  int64_t bytes = 0;
  for (const Tensor& t : buffers) {
    require(!t.defined() || t.device() == Device::CUDA, what, " in \"", name(),
            "\": NCCL moves what is in the memory of a GPU, and this tensor is in the CPU's");
    bytes += t.bytes();
  }
  auto operation = watch_->launch(*group_, what, device::stream(), stream_, [&] {
    if (times()) under_way_begins(*times(), stream_);
    if (bytes > 0) call();
    if (times()) times()->under_way->in_stream->end.record_in(stream_);
  });
  return std::make_unique<NcclState>(std::move(operation), std::move(buffers));
}

void NcclCommunicator::connect() {
  if (size() == 1 || std::exchange(connected_, true)) return;
  copies_ = CopyEngines::open(rank(), size(), [this](const std::string& mine) {
    return exchange_texts("the opening of inboxes", mine);
  });
}

// Null where NCCL is to do it: a graph would repeat the numbers of pieces that it has captured, and
// the texts that connect ranks cannot go by what they connect.
CopyEngines* NcclCommunicator::copies_for(const Tensor& largest) {
  if (telling_ || largest.bytes() < options().copy_from || device::capturing()) return nullptr;
  connect();
  return copies_.get();
}

Communicator::Pending NcclCommunicator::do_all_reduce(const Tensor& buffer, ReduceOp op) {
  ncclDataType_t type = nccl_type(buffer.dtype());
  CopyEngines* copies = copies_for(buffer);
  return enqueue("all_reduce", {buffer}, [&] {
    if (copies) return copies->all_reduce(buffer, op, stream_);
    check(ncclAllReduce(buffer.raw(), buffer.raw(), size_t(buffer.size()), type, nccl_op(op), comm_,
                        stream_));
  });
}

// Only the root's buffer is written.
Communicator::Pending NcclCommunicator::do_reduce(const Tensor& buffer, int root, ReduceOp op) {
  ncclDataType_t type = nccl_type(buffer.dtype());
  return enqueue("reduce", {buffer}, [&] {
    check(ncclReduce(buffer.raw(), buffer.raw(), size_t(buffer.size()), type, nccl_op(op), root,
                     comm_, stream_));
  });
}

Communicator::Pending NcclCommunicator::do_broadcast(const Tensor& buffer, int root) {
  return enqueue("broadcast", {buffer}, [&] {
    check(ncclBroadcast(buffer.raw(), buffer.raw(), size_t(buffer.bytes()), ncclUint8, root, comm_,
                        stream_));
  });
}

// In place if shard is the rank's own part of whole: NCCL compares the addresses.
Communicator::Pending NcclCommunicator::do_all_gather(const Tensor& shard, const Tensor& whole) {
  CopyEngines* copies = copies_for(whole);
  return enqueue("all_gather", {shard, whole}, [&] {
    if (copies) return copies->all_gather(shard, whole, stream_);
    check(
        ncclAllGather(shard.raw(), whole.raw(), size_t(shard.bytes()), ncclUint8, comm_, stream_));
  });
}

Communicator::Pending NcclCommunicator::do_reduce_scatter(const Tensor& whole, const Tensor& shard,
                                                          ReduceOp op) {
  ncclDataType_t type = nccl_type(whole.dtype());
  CopyEngines* copies = copies_for(whole);
  return enqueue("reduce_scatter", {whole, shard}, [&] {
    if (copies) return copies->reduce_scatter(whole, shard, op, stream_);
    check(ncclReduceScatter(whole.raw(), shard.raw(), size_t(shard.size()), type, nccl_op(op),
                            comm_, stream_));
  });
}

Communicator::Pending NcclCommunicator::post(const char* what, std::vector<Tensor> buffers,
                                             const std::vector<P2P>& messages) {
  std::vector<P2P> by_copy, by_kernel;
  Tensor own_from, own_to;
  for (const P2P& m : messages) {
    if (m.peer == rank()) {
      (m.kind == P2P::Send ? own_from : own_to) = m.buffer;
    } else if (m.buffer.bytes() > 0) {
      (copies_ && copies_for(m.buffer) ? by_copy : by_kernel).push_back(m);
    }
  }
  return enqueue(what, std::move(buffers), [&] {
    if (own_to.raw() != own_from.raw()) {
      device::OnStream on(stream_);
      copy(own_to, own_from);
    }
    if (!by_copy.empty()) copies_->exchange(by_copy, stream_);
    check(ncclGroupStart());
    for (const P2P& m : by_kernel) {
      size_t bytes = size_t(m.buffer.bytes());
      check(m.kind == P2P::Send
                ? ncclSend(m.buffer.raw(), bytes, ncclUint8, m.peer, comm_, stream_)
                : ncclRecv(m.buffer.raw(), bytes, ncclUint8, m.peer, comm_, stream_));
    }
    check(ncclGroupEnd());
  });
}

Communicator::Pending NcclCommunicator::do_gather(const Tensor& shard, const Tensor& whole,
                                                  int root) {
  std::vector<P2P> messages = {{P2P::Send, root, shard}};
  for (int r = 0; rank() == root && r < size(); ++r)
    messages.push_back({P2P::Receive, r, whole.flat(r * shard.size(), shard.size())});
  return post("gather", {shard, whole}, messages);
}

Communicator::Pending NcclCommunicator::do_scatter(const Tensor& whole, const Tensor& shard,
                                                   int root) {
  std::vector<P2P> messages = {{P2P::Receive, root, shard}};
  for (int r = 0; rank() == root && r < size(); ++r)
    messages.push_back({P2P::Send, r, whole.flat(r * shard.size(), shard.size())});
  return post("scatter", {whole, shard}, messages);
}

Communicator::Pending NcclCommunicator::do_all_to_all(const Tensor& send,
                                                      const std::vector<int64_t>& send_rows,
                                                      const Tensor& recv,
                                                      const std::vector<int64_t>& recv_rows) {
  std::vector<P2P> messages;
  int64_t sent = 0, received = 0;
  for (int r = 0; r < size(); ++r) {
    messages.push_back({P2P::Send, r, send.rows(sent, send_rows[size_t(r)])});
    messages.push_back({P2P::Receive, r, recv.rows(received, recv_rows[size_t(r)])});
    sent += send_rows[size_t(r)];
    received += recv_rows[size_t(r)];
  }
  return post("all_to_all", {send, recv}, messages);
}

Communicator::Pending NcclCommunicator::do_exchange(const std::vector<P2P>& messages) {
  std::vector<Tensor> buffers;
  for (const P2P& m : messages) buffers.push_back(m.buffer);
  return post("exchange", std::move(buffers), messages);
}

// Behind everything that the rank has enqueued so far.
void NcclCommunicator::do_barrier() {
  Tensor one = Tensor::zeros({1}, DType::I32, Device::CUDA, Category::Buffers);
  enqueue("barrier", {one}, [&] {
    check(ncclAllReduce(one.raw(), one.raw(), 1, ncclInt32, ncclSum, comm_, stream_));
  })->wait();
  device::synchronize();
}

// As one all_gather of slots as long as the longest text.
std::vector<std::string> NcclCommunicator::exchange_texts(std::string_view,
                                                          const std::string& mine) {
  telling_ = true;
  Tensor longest =
      Tensor::from<int64_t>({int64_t(mine.size())}, {1}, Device::CUDA, Category::Buffers);
  do_all_reduce(longest, ReduceOp::Max)->wait();
  size_t slot = size_t(longest.values<int64_t>()[0]) + 1;  // with a zero behind each text
  std::vector<uint8_t> padded(mine.begin(), mine.end());
  padded.resize(slot);
  Tensor part = Tensor::from(padded, {int64_t(slot)}, Device::CUDA, Category::Buffers);
  Tensor whole =
      Tensor::empty({int64_t(slot) * size()}, DType::U8, Device::CUDA, Category::Buffers);
  do_all_gather(part, whole)->wait();
  telling_ = false;
  std::vector<uint8_t> all = whole.values<uint8_t>();
  std::vector<std::string> texts;
  for (size_t r = 0; r < size_t(size()); ++r)
    texts.emplace_back(reinterpret_cast<const char*>(all.data() + r * slot));
  return texts;
}

}  // namespace lockstep
