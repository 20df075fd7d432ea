#pragma once
// When an operation (comm.h) was under way, and when its rank stood still for it:
//
//   the rank    … computes | launch | computes … | wait() | computes …
//   messages                |▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒|      under way
//                            ░░░░░░░░               ░░░░░░░░        the rank stands still
//
// Only a meter (overlap_meter.h) and a recording trace (trace.h) ask; without them no clock is
// read. What the two stretches mean, backend by backend:
//
//   MPI      messages are under way from launch to the last of them, whoever keeps them moving. The
//            rank stands still in its launch and in wait().
//   NCCL     from the moment the communicator's stream reaches the operation to its end. The rank's
//            stream stands still in wait(); the host never does, and a launch costs its time only.
//   threads  nothing moves but in launch and wait(), so that nothing is hidden. wait() is also
//            where a rank waits for those that have not posted yet: a late rank's delay belongs to
//            the operation, as it does with the other two.

#include <chrono>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "common/comm.h"
#include "common/device.h"

namespace lockstep {

// A stretch of a rank's time: by the host's clock and, on a GPU, as two points in its stream, whose
// times are known when it has passed them.
struct Stretch {
  using Clock = std::chrono::steady_clock;
  Clock::time_point begin{}, end{};
  std::shared_ptr<device::TimedPair> in_stream;  // null: the clock is what counts

  bool happened() const { return begin != Clock::time_point{}; }
  void start(Device device);
  void stop();
  int64_t nanoseconds() const;  // waits until the stream has passed it
};

struct OperationTimes {
  Collective operation;
  std::string group;
  int64_t payload;  // bytes
  Device device;
  int64_t window;  // of the trace when it was launched (Trace::window)
  Stretch launch, wait;
  std::optional<Stretch> under_way;  // set by a backend whose messages move beside the rank

  std::string words() const;                  // "all_reduce dp 25.0 MB"
  std::vector<const Stretch*> still() const;  // when the rank stood still
  std::vector<const Stretch*> moving() const;
};

// For Communicator::launch(). Times of the operation that the ledger knows last, if anybody wants
// them; its launch has begun.
std::shared_ptr<OperationTimes> start_times(Ledger& ledger);
// The launch is over: a state that measures wait(), too, and then tells who wants to know.
std::unique_ptr<Work::State> measured(std::unique_ptr<Work::State> operation,
                                      std::shared_ptr<OperationTimes> times, Ledger& ledger);

}  // namespace lockstep
