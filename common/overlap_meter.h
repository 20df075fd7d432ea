#pragma once
// What communication costs a step: not how long messages are under way, but how much of that the
// rank stands still for. The rest is hidden behind computation.
//
//   naive        compute    backward ██████████████████ ░░░░░░░░░░░░░░░░ optimizer
//                network                                ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒
//   overlapped   compute    backward ██████████████████ ░░ optimizer
//                network              ▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒▒      ▒ under way   ░ exposed
//
//   OverlapMeter meter(world.ledger(), device);
//   … some steps …
//   std::string words = line(meter.read().sum(mesh.data().name()), steps);
//
//   communication 16.0 ms a step, 2.0 ms of it exposed (12.5 %)
//
// It counts all operations of all groups of its rank, from the largest bucket to the sum of one
// number; sum() picks. Where times come from, and what they mean when ranks are threads:
// operation_times.h. On a GPU they come from events, which nobody waits for: an operation is
// counted in the first reading after the stream has passed it, and may be off by the few
// microseconds that an event takes. A group of one rank has nothing to move and is not counted.

#include <deque>
#include <memory>
#include <string>
#include <vector>

#include "common/intervals.h"
#include "common/ledger.h"
#include "common/operation_times.h"

namespace lockstep {

// Of one rank, from its construction to its end: one meter for a ledger at a time.
class OverlapMeter {
 public:
  OverlapMeter(Ledger& ledger, Device device);
  ~OverlapMeter();
  OverlapMeter(const OverlapMeter&) = delete;
  Device device() const { return device_; }

  struct Operation {
    Collective operation;
    std::string group;
    int64_t payload;
    std::vector<Interval> under_way;
    int64_t exposed;  // nanoseconds
  };
  struct Sum {
    int64_t operations = 0, payload = 0;
    double under_way = 0, exposed = 0;  // seconds; operations that are under way at once count once
    double exposed_share() const { return under_way > 0 ? exposed / under_way : 0; }
  };
  struct Reading {
    std::vector<Operation> operations;
    // Of one group, or of all if it has no name; of operations on at least so many bytes.
    Sum sum(const std::string& group = "", int64_t bytes = 0) const;
  };
  Reading read();  // since the last one

  void add(std::shared_ptr<const OperationTimes> times);  // of an operation that was waited for

 private:
  void settle();

  Ledger& ledger_;
  Device device_;
  std::deque<std::shared_ptr<const OperationTimes>> open_;  // the stream may still be before them
  Reading settled_;
  int64_t laid_ = 0;
};

std::string line(const OverlapMeter::Sum& sum, int64_t steps);

}  // namespace lockstep
