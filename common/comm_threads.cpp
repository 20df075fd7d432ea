#include "common/comm_threads.h"

#include <algorithm>
#include <chrono>
#include <sstream>
#include <thread>

#include "common/reduce.h"

namespace lockstep {

// One rank's contribution to one operation.
struct Part {
  Tensor data;                             // a copy; undefined if this rank gives nothing
  std::string words;                       // of exchange_texts and split
  std::vector<int64_t> rows;               // of all_to_all
  std::shared_ptr<device::Event> written;  // on a GPU: when the copy is complete
};

// One collective, from the first rank that posts to the last that has taken its result.
struct Slot {
  std::vector<Part> parts;
  int posted = 0, done = 0;
  std::vector<bool> came;
  Tensor sum;  // of an all_reduce: ranks share the adding
  std::atomic<int64_t> next_piece = 0, pieces_done = 0;
  std::vector<std::shared_ptr<device::Event>> readers;
};

class Hub {
 public:
  Hub(int size, std::shared_ptr<Failure> failure) : size(size), failure(std::move(failure)) {}
  const int size;
  const std::shared_ptr<Failure> failure;
  std::mutex mutex;
  std::condition_variable changed;
  std::map<int64_t, std::shared_ptr<Slot>> slots;                    // by number of the collective
  std::map<std::tuple<int, int, int64_t>, Part> mail;                // from, to, number
  std::map<std::pair<int64_t, int>, std::shared_ptr<Hub>> children;  // of splits: number, color

  // Waits under `lock` until ready() holds, a rank has failed, or the time is over.
  template <class Ready, class Missing>
  void await(std::unique_lock<std::mutex>& lock, double seconds, Ready&& ready, Missing&& missing) {
    auto limit = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    while (!ready()) {
      require(!failure->happened, "stopped, because another rank failed");
      require(std::chrono::steady_clock::now() < limit, missing());
      changed.wait_for(lock, std::chrono::milliseconds(20));
    }
  }
};

std::shared_ptr<Hub> make_hub(int size, std::shared_ptr<Failure> failure) {
  return std::make_shared<Hub>(size, std::move(failure));
}

void Failure::report(int failed_rank, const std::string& what) {
  std::lock_guard lock(mutex);
  if (happened) return;
  rank = failed_rank;
  sentence = what;
  happened = true;
}

// A copy that no rank's later writes can touch.
static Part post_copy(const Tensor& t) {
  Part part;
  if (!t.defined()) return part;
  part.data = Tensor::empty(t.shape(), t.dtype(), t.device(), Category::Buffers);
  copy(part.data, t);
  if (t.device() == Device::CUDA) {
    part.written = std::make_shared<device::Event>();
    part.written->record();
  }
  return part;
}

// Its data, safe to read in this rank's stream.
static const Tensor& read(const Part& part) {
  if (part.written) part.written->block_stream();
  return part.data;
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

// One rank's view of one collective: posted at construction, finished by take() in wait().
class Meeting : public Work::State {
 public:
  using Take = std::function<void(Slot&)>;
  Meeting(ThreadCommunicator& comm, const char* what, Part part, Take take)
      : comm_(comm), hub_(*comm.hub_), what_(what), number_(comm.calls_++), take_(std::move(take)) {
    std::lock_guard lock(hub_.mutex);
    std::shared_ptr<Slot>& slot = hub_.slots[number_];
    if (!slot) {
      slot = std::make_shared<Slot>();
      slot->parts.resize(size_t(hub_.size));
      slot->came.resize(size_t(hub_.size));
    }
    slot_ = slot;
    slot_->parts[size_t(comm.rank())] = std::move(part);
    slot_->came[size_t(comm.rank())] = true;
    if (++slot_->posted == hub_.size) hub_.changed.notify_all();
  }

  void wait() override {
    {
      std::unique_lock lock(hub_.mutex);
      hub_.await(
          lock, comm_.options().time_limit, [&] { return slot_->posted == hub_.size; },
          [&] { return missing(); });
    }
    if (take_) take_(*slot_);
    leave();
  }

 private:
  std::string missing() const {
    std::string absent;
    for (int r = 0; r < hub_.size; ++r)
      if (!slot_->came[size_t(r)]) absent += text(absent.empty() ? "" : ", ", r);
    return text("rank ", comm_.rank(), " waited ", comm_.options().time_limit, " s for ", what_,
                " (number ", number_, " in \"", comm_.name(), "\"), to which rank ", absent,
                " never came");
  }

  // The last one out frees the copies; on a GPU not before every stream has read them.
  void leave() {
    std::shared_ptr<device::Event> read;
    for (const Part& p : slot_->parts)
      if (p.written && !read) {
        read = std::make_shared<device::Event>();
        read->record();
      }
    std::lock_guard lock(hub_.mutex);
    if (read) slot_->readers.push_back(read);
    if (++slot_->done < hub_.size) return;
    for (auto& event : slot_->readers) event->block_stream();
    hub_.slots.erase(number_);
    slot_->parts.clear();
    slot_->sum = {};
  }

  ThreadCommunicator& comm_;
  Hub& hub_;
  const char* what_;
  int64_t number_;
  Take take_;
  std::shared_ptr<Slot> slot_;
};

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
  return std::make_unique<Meeting>(*this, "all_reduce", post_copy(buffer), take);
}

Communicator::Pending ThreadCommunicator::do_reduce(const Tensor& buffer, int root, ReduceOp op) {
  auto take = [this, buffer, root, op](Slot& slot) {
    if (rank() == root) reduce_parts(buffer, slot.parts, 0, buffer.size(), op);
  };
  return std::make_unique<Meeting>(*this, "reduce", post_copy(buffer), take);
}

Communicator::Pending ThreadCommunicator::do_broadcast(const Tensor& buffer, int root) {
  auto take = [this, buffer, root](Slot& slot) {
    if (rank() != root) copy(buffer, read(slot.parts[size_t(root)]));
  };
  Part part = rank() == root ? post_copy(buffer) : Part{};
  return std::make_unique<Meeting>(*this, "broadcast", std::move(part), take);
}

Communicator::Pending ThreadCommunicator::do_all_gather(const Tensor& shard, const Tensor& whole) {
  auto take = [whole](Slot& slot) {
    int64_t each = whole.size() / int64_t(slot.parts.size());
    for (size_t r = 0; r < slot.parts.size(); ++r)
      copy(whole.flat(int64_t(r) * each, each), read(slot.parts[r]));
  };
  return std::make_unique<Meeting>(*this, "all_gather", post_copy(shard), take);
}

Communicator::Pending ThreadCommunicator::do_reduce_scatter(const Tensor& whole,
                                                            const Tensor& shard, ReduceOp op) {
  auto take = [this, shard, op](Slot& slot) {
    reduce_parts(shard, slot.parts, rank() * shard.size(), shard.size(), op);
  };
  return std::make_unique<Meeting>(*this, "reduce_scatter", post_copy(whole), take);
}

Communicator::Pending ThreadCommunicator::do_gather(const Tensor& shard, const Tensor& whole,
                                                    int root) {
  auto take = [this, whole, root](Slot& slot) {
    if (rank() != root) return;
    int64_t each = whole.size() / size();
    for (int r = 0; r < size(); ++r) copy(whole.flat(r * each, each), read(slot.parts[size_t(r)]));
  };
  return std::make_unique<Meeting>(*this, "gather", post_copy(shard), take);
}

Communicator::Pending ThreadCommunicator::do_scatter(const Tensor& whole, const Tensor& shard,
                                                     int root) {
  auto take = [this, shard, root](Slot& slot) {
    copy(shard, read(slot.parts[size_t(root)]).flat(rank() * shard.size(), shard.size()));
  };
  Part part = rank() == root ? post_copy(whole) : Part{};
  return std::make_unique<Meeting>(*this, "scatter", std::move(part), take);
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
  return std::make_unique<Meeting>(*this, "all_to_all", std::move(part), take);
}

// Receives wait for their letter; sends are delivered when they are posted.
class Letters : public Work::State {
 public:
  struct Expected {
    std::tuple<int, int, int64_t> address;
    Tensor buffer;
  };
  Letters(std::shared_ptr<Hub> hub, std::string who, double limit, std::vector<Expected> expected)
      : hub_(std::move(hub)), who_(std::move(who)), limit_(limit), expected_(std::move(expected)) {}
  void wait() override {
    for (const Expected& e : expected_) {
      Part part;
      {
        std::unique_lock lock(hub_->mutex);
        hub_->await(
            lock, limit_, [&] { return hub_->mail.contains(e.address); },
            [&] {
              return text(who_, " waited ", limit_, " s for message ", std::get<2>(e.address),
                          " of an exchange, which rank ", std::get<0>(e.address), " never sent");
            });
        auto found = hub_->mail.find(e.address);
        part = std::move(found->second);
        hub_->mail.erase(found);
      }
      copy(e.buffer, read(part));  // the copy is freed here, in the stream that has read it
    }
  }

 private:
  std::shared_ptr<Hub> hub_;
  std::string who_;
  double limit_;
  std::vector<Expected> expected_;
};

Communicator::Pending ThreadCommunicator::do_exchange(const std::vector<P2P>& messages) {
  std::vector<Letters::Expected> expected;
  for (const P2P& m : messages) {
    size_t peer = size_t(m.peer);
    if (m.kind == P2P::Receive) {
      expected.push_back({{m.peer, rank(), received_[peer]++}, m.buffer});
      continue;
    }
    Part letter = post_copy(m.buffer);
    std::lock_guard lock(hub_->mutex);
    hub_->mail[{rank(), m.peer, sent_[peer]++}] = std::move(letter);
    hub_->changed.notify_all();
  }
  return std::make_unique<Letters>(hub_, text("rank ", rank(), " of \"", name(), "\""),
                                   options().time_limit, std::move(expected));
}

void ThreadCommunicator::do_barrier() { Meeting(*this, "barrier", {}, {}).wait(); }

std::vector<std::string> ThreadCommunicator::exchange_texts(const std::string& mine) {
  std::vector<std::string> all;
  Part part;
  part.words = mine;
  Meeting meeting(*this, "a check of calls", std::move(part), [&](Slot& slot) {
    for (const Part& p : slot.parts) all.push_back(p.words);
  });
  meeting.wait();
  return all;
}

std::unique_ptr<Communicator> ThreadCommunicator::do_split(int color, int key,
                                                           const std::string& group) {
  int64_t number = calls_;
  std::vector<std::string> all = exchange_texts(text(color, " ", key));
  std::vector<std::pair<int, int>> members;  // key, rank
  for (int r = 0; r < size(); ++r) {
    std::istringstream words(all[size_t(r)]);
    int their_color, their_key;
    words >> their_color >> their_key;
    if (their_color == color) members.emplace_back(their_key, r);
  }
  std::sort(members.begin(), members.end());
  std::vector<int> ranks;
  int mine = 0;
  for (size_t i = 0; i < members.size(); ++i) {
    if (members[i].second == rank()) mine = int(i);
    ranks.push_back(world_ranks()[size_t(members[i].second)]);
  }
  std::shared_ptr<Hub> child;
  {
    std::lock_guard lock(hub_->mutex);
    std::shared_ptr<Hub>& slot = hub_->children[{number, color}];
    if (!slot) slot = make_hub(int(members.size()), hub_->failure);
    child = slot;
  }
  return std::make_unique<ThreadCommunicator>(child, mine, group, ranks, shared_ledger(),
                                              options());
}

}  // namespace lockstep
