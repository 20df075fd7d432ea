#include "common/comm_threads.h"

#include <algorithm>
#include <thread>

#include "common/comm_threads_hub.h"
#include "common/reduce.h"

namespace lockstep {

static Terms terms(std::string_view what, const Tensor& t, int root = -1) {
  return {what, t.size(), t.dtype(), root};
}

// to = op over all parts of `count` elements from `first` on.
static void reduce_parts(const Tensor& to, const std::vector<Part>& parts, int64_t first,
                         int64_t count, ReduceOp op) {
  std::vector<const std::byte*> data;
  for (const Part& p : parts) data.push_back(read(p).flat(first, count).raw());
  if (to.device() == Device::CUDA) {
    cuda::reduce_in_rank_order(to, data, op);
  } else {
    reduce_in_rank_order(to.raw(), data, count, to.dtype(), op);
  }
}

ThreadCommunicator::ThreadCommunicator(std::shared_ptr<Hub> hub, int rank, std::string name,
                                       std::vector<int> world_ranks, std::shared_ptr<Ledger> ledger,
                                       Options options)
    : Communicator(rank, hub->size, std::move(name), std::move(world_ranks), std::move(ledger),
                   options),
      hub_(std::move(hub)),
      sent_(size_t(size())),
      received_(size_t(size())) {}

Communicator::Pending ThreadCommunicator::do_all_reduce(const Tensor& buffer, ReduceOp op) {
  auto take = [this, buffer, op](Slot& slot) {
    if (buffer.device() == Device::CUDA)
      return reduce_parts(buffer, slot.parts, 0, buffer.size(), op);
    // The adding is shared: whoever waits takes the next piece, until none is left.
    constexpr int64_t kPiece = 1 << 15;
    int64_t pieces = (buffer.size() + kPiece - 1) / kPiece;
    {
      std::lock_guard lock(hub_->mutex);
      if (!slot.sum.defined())
        slot.sum = Tensor::empty(buffer.shape(), buffer.dtype(), Device::CPU, Category::Buffers);
    }
    for (int64_t i; (i = slot.next_piece++) < pieces; ++slot.pieces_done) {
      int64_t first = i * kPiece, count = std::min(kPiece, buffer.size() - first);
      reduce_parts(slot.sum.flat(first, count), slot.parts, first, count, op);
    }
    while (slot.pieces_done < pieces) std::this_thread::yield();
    copy(buffer, slot.sum);
  };
  return std::make_unique<Meeting>(*this, terms("all_reduce", buffer), post_copy(buffer), take);
}

Communicator::Pending ThreadCommunicator::do_reduce(const Tensor& buffer, int root, ReduceOp op) {
  auto take = [this, buffer, root, op](Slot& slot) {
    if (rank() == root) reduce_parts(buffer, slot.parts, 0, buffer.size(), op);
  };
  return std::make_unique<Meeting>(*this, terms("reduce", buffer, root), post_copy(buffer), take);
}

Communicator::Pending ThreadCommunicator::do_broadcast(const Tensor& buffer, int root) {
  auto take = [this, buffer, root](Slot& slot) {
    if (rank() != root) copy(buffer, read(slot.parts[size_t(root)]));
  };
  Part part = rank() == root ? post_copy(buffer) : Part{};
  return std::make_unique<Meeting>(*this, terms("broadcast", buffer, root), std::move(part), take);
}

Communicator::Pending ThreadCommunicator::do_all_gather(const Tensor& shard, const Tensor& whole) {
  auto take = [whole](Slot& slot) {
    int64_t each = whole.size() / int64_t(slot.parts.size());
    for (size_t r = 0; r < slot.parts.size(); ++r)
      copy(whole.flat(int64_t(r) * each, each), read(slot.parts[r]));
  };
  return std::make_unique<Meeting>(*this, terms("all_gather", shard), post_copy(shard), take);
}

Communicator::Pending ThreadCommunicator::do_reduce_scatter(const Tensor& whole,
                                                            const Tensor& shard, ReduceOp op) {
  auto take = [this, shard, op](Slot& slot) {
    reduce_parts(shard, slot.parts, rank() * shard.size(), shard.size(), op);
  };
  return std::make_unique<Meeting>(*this, terms("reduce_scatter", whole), post_copy(whole), take);
}

Communicator::Pending ThreadCommunicator::do_gather(const Tensor& shard, const Tensor& whole,
                                                    int root) {
  auto take = [this, whole, root](Slot& slot) {
    if (rank() != root) return;
    int64_t each = whole.size() / size();
    for (int r = 0; r < size(); ++r) copy(whole.flat(r * each, each), read(slot.parts[size_t(r)]));
  };
  return std::make_unique<Meeting>(*this, terms("gather", shard, root), post_copy(shard), take);
}

Communicator::Pending ThreadCommunicator::do_scatter(const Tensor& whole, const Tensor& shard,
                                                     int root) {
  auto take = [this, shard, root](Slot& slot) {
    copy(shard, read(slot.parts[size_t(root)]).flat(rank() * shard.size(), shard.size()));
  };
  Part part = rank() == root ? post_copy(whole) : Part{};
  return std::make_unique<Meeting>(*this, terms("scatter", shard, root), std::move(part), take);
}

Communicator::Pending ThreadCommunicator::do_all_to_all(const Tensor& send,
                                                        const std::vector<int64_t>& send_rows,
                                                        const Tensor& recv,
                                                        const std::vector<int64_t>& recv_rows) {
  auto take = [this, recv, recv_rows](Slot& slot) {
    int64_t at = 0;
    for (int r = 0; r < size(); ++r) {
      const Part& part = slot.parts[size_t(r)];
      int64_t first = 0, rows = part.rows[size_t(rank())];
      for (int k = 0; k < rank(); ++k) first += part.rows[size_t(k)];
      require(rows == recv_rows[size_t(r)], "rank ", r, " sends ", rows, " rows to rank ", rank(),
              ", which expects ", recv_rows[size_t(r)]);
      if (rows > 0) copy(recv.rows(at, rows), read(part).rows(first, rows));
      at += rows;
    }
  };
  Part part = post_copy(send);
  part.rows = send_rows;
  int64_t width = elements(Shape(send.shape().begin() + 1, send.shape().end()));
  return std::make_unique<Meeting>(*this, Terms{"all_to_all", width, send.dtype()}, std::move(part),
                                   take);
}

Communicator::Pending ThreadCommunicator::do_exchange(const std::vector<P2P>& messages) {
  std::vector<Letters::Expected> expected;
  for (const P2P& m : messages) {
    size_t peer = size_t(m.peer);
    if (m.kind == P2P::Receive) {
      expected.push_back({{m.peer, rank(), received_[peer]++}, world_ranks()[peer], m.buffer});
      continue;
    }
    Part letter = post_copy(m.buffer);
    std::lock_guard lock(hub_->mutex);
    hub_->mail[{rank(), m.peer, sent_[peer]++}] = std::move(letter);
    hub_->changed.notify_all();
  }
  return std::make_unique<Letters>(hub_, name(), options().time_limit, std::move(expected));
}

void ThreadCommunicator::do_barrier() { Meeting(*this, {"barrier"}, {}, {}).wait(); }

std::vector<std::string> ThreadCommunicator::exchange_texts(std::string_view what,
                                                            const std::string& mine) {
  std::vector<std::string> all;
  Part part;
  part.words = mine;
  Meeting meeting(*this, {what}, std::move(part), [&](Slot& slot) {
    for (const Part& p : slot.parts) all.push_back(p.words);
  });
  meeting.wait();
  return all;
}

std::unique_ptr<Communicator> ThreadCommunicator::do_split(const Members& members,
                                                           const std::string& group) {
  std::pair<int64_t, int> which{splits_++, members.color};
  std::shared_ptr<Hub> child;
  {
    std::lock_guard lock(hub_->mutex);
    Hub::Child& entry = hub_->children[which];
    if (!entry.hub) entry.hub = make_hub(int(members.world_ranks.size()), hub_->failure);
    child = entry.hub;
    if (++entry.found == child->size) hub_->children.erase(which);
  }
  return std::make_unique<ThreadCommunicator>(child, members.mine, group, members.world_ranks,
                                              shared_ledger(), options());
}

}  // namespace lockstep
