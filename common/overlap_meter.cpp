#include "common/overlap_meter.h"

#include <cstdio>
#include <utility>

#include "common/check.h"

namespace lockstep {

OverlapMeter::OverlapMeter(Ledger& ledger, Device device) : ledger_(ledger), device_(device) {
  require(!ledger.meter(), "this rank's communication is being measured by another meter");
  ledger_.set_meter(this);
}

OverlapMeter::~OverlapMeter() { ledger_.set_meter(nullptr); }

void OverlapMeter::add(std::shared_ptr<const OperationTimes> times) {
  open_.push_back(std::move(times));
  settle();
}

// wait() ends behind the operation, so that with its last point all have been passed.
static bool passed(const OperationTimes& times) {
  for (const Stretch* s : times.still())
    if (s->in_stream && !s->in_stream->end.passed()) return false;
  return true;
}

void OverlapMeter::settle() {
  for (; !open_.empty() && passed(*open_.front()); open_.pop_front()) {
    const OperationTimes& times = *open_.front();
    Operation done{times.operation, times.group, times.payload, {}, 0};
    for (const Stretch* s : times.still()) done.exposed += s->nanoseconds();
    for (const Stretch* s : times.moving()) {
      auto at = [](Stretch::Clock::time_point t) {
        return std::chrono::nanoseconds(t.time_since_epoch()).count();
      };
      // In a stream, operations run one after the other: their lengths are laid end to end.
      Interval in_stream{laid_, laid_ + (s->in_stream ? s->nanoseconds() : 0)};
      laid_ = in_stream.end;
      done.under_way.push_back(s->in_stream ? in_stream : Interval{at(s->begin), at(s->end)});
    }
    settled_.operations.push_back(std::move(done));
  }
}

OverlapMeter::Reading OverlapMeter::read() {
  settle();
  return std::exchange(settled_, {});
}

OverlapMeter::Sum OverlapMeter::Reading::sum(const std::string& group, int64_t bytes) const {
  Sum sum;
  std::vector<Interval> under_way;
  int64_t exposed = 0;
  for (const Operation& o : operations) {
    if ((!group.empty() && o.group != group) || o.payload < bytes) continue;
    ++sum.operations;
    sum.payload += o.payload;
    exposed += o.exposed;
    under_way.insert(under_way.end(), o.under_way.begin(), o.under_way.end());
  }
  // What the rank's own calls take beside the messages belongs to the operation, too.
  sum.under_way = 1e-9 * double(std::max(length_of(united(under_way)), exposed));
  sum.exposed = 1e-9 * double(exposed);
  return sum;
}

std::string line(const OverlapMeter::Sum& sum, int64_t steps) {
  auto ms = [&](double seconds) { return 1e3 * seconds / double(std::max<int64_t>(1, steps)); };
  char out[120];
  std::snprintf(out, sizeof out, "communication %.1f ms a step, %.1f ms of it exposed (%.1f %%)",
                ms(sum.under_way), ms(sum.exposed), 100 * sum.exposed_share());
  return out;
}

}  // namespace lockstep
