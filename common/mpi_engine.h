#pragma once
// What makes this process's MPI calls. An operation is a short list of stages; an all-reduce over
// three ranks, as rank 0 sees it:
//
//     stage   sends                       receives                       then
//     0       my 1 ▶ rank 1, 2 ▶ rank 2   their chunk 0 ◀ ranks 1, 2     chunk 0 = sum in rank
//     order 1       sum 0 ▶ ranks 1, 2          sum 1 ◀ rank 1, 2 ◀ rank 2
//
// MPI moves messages only while somebody calls it, and so do stages. A rank that waits does that
// itself. While it computes, a helper thread does it, some thousand times a second or less often if
// nothing moves: that is what makes communication go on behind computation. Both hold a lock, so
// that MPI sees one caller at a time (MPI_THREAD_SERIALIZED). The helper sleeps when nothing is
// under way.

#include <mpi.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <source_location>
#include <thread>

#include "common/comm.h"
#include "common/operation_times.h"

namespace lockstep {

// A library call that must succeed: one sentence if it did not.
void check_mpi(int status, std::source_location where = std::source_location::current());

struct Message {
  int peer;
  Tensor data;  // on the host; undefined: an empty message, which only says "I am here"
};

struct MessageStage {
  std::vector<Message> sends = {}, receives = {};
  std::function<void()> then = {};  // once all have arrived and all are gone
};

// One operation of one rank, from launch to its last message.
struct Operation {
  std::string name;              // e.g.: all_reduce (number 3 in "world")
  std::vector<int> world_ranks;  // of the group's members: what an error calls them
  MPI_Comm comm;
  int tag;
  int64_t piece;  // bytes of the largest message
  std::vector<MessageStage> stages;
  std::shared_ptr<OperationTimes> times;  // null: nobody measures

  std::atomic<bool> done = false;
  std::string error;  // final once done

  // Of the stage under way; the engine's own.
  struct Piece {
    int peer, bytes;
    bool sent, open;
  };
  size_t stage = 0;
  std::vector<MPI_Request> requests;
  std::vector<Piece> pieces;  // one for each request
  size_t open = 0;
  std::string missing() const;  // "rank 2", "ranks 1, 3": whose messages have not come
};

class MpiEngine {
 public:
  MpiEngine(int rank, bool crowded);  // crowded: ranks are more than cores
  ~MpiEngine();

  void start(std::shared_ptr<Operation> operation);
  void wait(Operation& operation, double seconds);  // throws

  // Any other use of MPI; false if it could not have its turn within `seconds`.
  bool call(double seconds, const std::function<void()>& f);

 private:
  void help();
  bool drive();
  void post(Operation& op);
  bool advance(Operation& op);
  bool collect(Operation& op);
  void finish(Operation& op, const std::string& error);
  [[noreturn]] void say_goodbye();

  const int rank_;
  const int patience_;    // how often wait() looks before it offers its core to others
  std::timed_mutex mpi_;  // who holds it may call MPI, and owns these:
  // MPI may still write into the buffers of operations that failed.
  std::vector<std::shared_ptr<Operation>> active_, failed_;
  std::vector<int> which_;  // of MPI_Testsome
  std::vector<MPI_Status> states_;

  std::mutex launched_mutex_;
  std::condition_variable wake_up_;
  std::vector<std::shared_ptr<Operation>> launched_;  // not posted yet
  std::atomic<int> under_way_ = 0, waiting_ = 0;      // operations; ranks in wait()
  std::atomic<bool> stop_ = false;
  std::thread helper_;
};

// All ranks of `comm`, which are `size` (comm_mpi.cpp).
std::unique_ptr<Communicator> make_mpi_world(MpiEngine& engine, MPI_Comm comm, int64_t piece,
                                             int rank, int size, Communicator::Options options);

}  // namespace lockstep
