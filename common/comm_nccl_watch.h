#pragma once
// Watches over NCCL. The host never waits for an operation, so nobody would notice that one hangs;
// a thread, one for each process, looks at the operations of all groups every few milliseconds and
// ends the process when one takes too long.
//
// The operations of a group run one after the other, so only the first that is not done can be the
// one that hangs. Its clock starts when its input is there: time that the rank itself computes
// before is not the other ranks' fault.

#include <cuda_runtime.h>
#include <nccl.h>

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <deque>
#include <functional>
#include <list>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>

#include "common/check.h"

namespace lockstep {

inline void check(ncclResult_t status, Here here = {}) {
  if (status != ncclSuccess)
    throw Error(text("NCCL: ", ncclGetErrorString(status), " (", ncclGetLastError(nullptr), ")"),
                here.where);
}

// Messages before computation: whoever is sent one may be idle until it comes.
cudaStream_t stream_of_messages();

// A point in a stream.
class Moment {
 public:
  Moment();
  ~Moment() { cudaEventDestroy(event_); }
  Moment(const Moment&) = delete;
  Moment& operator=(const Moment&) = delete;
  void record(cudaStream_t stream);
  void block(cudaStream_t stream) const;  // what is enqueued next in `stream` comes after it
  bool passed() const;                    // also when CUDA has failed: others report that
  cudaEvent_t event() const { return event_; }

 private:
  cudaEvent_t event_ = nullptr;
};

struct NcclOperation {
  const char* name;
  int64_t number;  // in its group
  double time_limit;
  Moment ready, done;                  // its input is there; its result is
  std::atomic<bool> launched = false;  // false: the host is inside the call, where NCCL may block
};

class NcclWatch {
 public:
  // One group of this process. Only its communicator and the watch use it.
  struct Group {
    std::string who, name;  // "rank 3", "world"
    double time_limit;
    ncclComm_t comm = nullptr;  // null: not to be asked for errors
    std::mutex in_nccl;         // NCCL does not promise that two threads may use one communicator
    std::deque<std::shared_ptr<NcclOperation>> operations;
    std::optional<std::chrono::steady_clock::time_point> started;  // the first operation's clock
    int64_t launches = 0;
  };

  NcclWatch();
  ~NcclWatch();
  std::shared_ptr<Group> open(std::string who, std::string name, double time_limit);
  void set_comm(Group& group, ncclComm_t comm);
  void close(const std::shared_ptr<Group>& group);

  // Runs `enqueue` as the group's next operation; see NcclCommunicator::enqueue().
  std::shared_ptr<NcclOperation> launch(Group& group, const char* name, cudaStream_t from,
                                        cudaStream_t stream, const std::function<void()>& enqueue);
  // Runs something in which the host itself waits for other ranks: starting and ending a group.
  void block(Group& group, const char* name, const std::function<void()>& call);

 private:
  void run(int device);
  void look_at(Group& group);
  std::shared_ptr<NcclOperation> add(Group& group, const char* name, double time_limit,
                                     bool watched);

  std::mutex mutex_;  // guards all below and what groups hold, but never a call of NCCL
  std::condition_variable changed_;
  std::list<std::shared_ptr<Group>> groups_;
  bool over_ = false;
  std::thread thread_;
};

}  // namespace lockstep
