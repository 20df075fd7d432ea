#pragma once
// Ranks as threads of one process. Launching posts a copy of the rank's data and never blocks;
// wait() blocks until all ranks have posted, and takes what the operation promises out of their
// copies. A copy belongs to nobody's buffer, so a rank may go on as soon as its own wait() is over,
// and ranks may wait for their operations in any order.
//
// On a GPU the copies are device memory: the posting rank's stream writes one and records an event,
// the reading rank's stream waits for that event. The host still waits until all have posted, no
// longer.

#include <atomic>
#include <condition_variable>
#include <map>
#include <mutex>

#include "common/comm.h"
#include "common/device.h"

namespace lockstep {

// Shared by all groups of a run: has a rank failed?
struct Failure {
  std::atomic<bool> happened = false;
  std::mutex mutex;
  int rank = -1;
  std::string sentence;
  void report(int failed_rank, const std::string& what);  // the first one is kept
};

class Hub;  // where the ranks of one group meet

class ThreadCommunicator : public Communicator {
 public:
  ThreadCommunicator(std::shared_ptr<Hub> hub, int rank, std::string name,
                     std::vector<int> world_ranks, std::shared_ptr<Ledger> ledger, Options options);
  const char* backend() const override { return "threads"; }

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
  friend class Meeting;
  std::shared_ptr<Hub> hub_;
  int64_t calls_ = 0;  // collectives so far: the number of the next one
  int64_t splits_ = 0;
  std::vector<int64_t> sent_, received_;  // messages to and from each peer
};

// The hub of a group of `size`. Failure is shared by the whole run.
std::shared_ptr<Hub> make_hub(int size, std::shared_ptr<Failure> failure);

}  // namespace lockstep
