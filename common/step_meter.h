#pragma once
// How much of their communication the steps of a run stood still for (overlap_meter.h).
// The first step, and what runs between steps (evaluation, checks, checkpoints), are left out.

#include <cstdio>

#include "common/device.h"
#include "common/overlap_meter.h"

namespace lockstep {

class StepMeter {
 public:
  StepMeter(Ledger& ledger, Device device) : meter_(ledger, device) {}

  void step() { add(), ++steps_; }  // has ended

  // While it lives, nothing counts. On a GPU operations are counted when the stream has passed
  // them, so those of the step have to be waited for first.
  class Pause {
   public:
    Pause(StepMeter& meter, bool happens) : meter_(happens || meter.first_ ? &meter : nullptr) {
      if (!meter_) return;
      device::synchronize();
      meter_->add();
    }
    ~Pause() {
      if (!meter_) return;
      meter_->meter_.read();
      if (std::exchange(meter_->first_, false)) meter_->sum_ = {}, meter_->steps_ = 0;
    }
    Pause(const Pause&) = delete;

   private:
    StepMeter* meter_;
  };

  void show() {
    device::synchronize();
    add();
    if (sum_.operations > 0 && steps_ > 0) std::printf("%s\n", line(sum_, steps_).c_str());
  }

 private:
  void add() {
    OverlapMeter::Sum more = meter_.read().sum();
    sum_.operations += more.operations;
    sum_.payload += more.payload;
    sum_.under_way += more.under_way;
    sum_.exposed += more.exposed;
  }

  OverlapMeter meter_;
  OverlapMeter::Sum sum_;
  int64_t steps_ = 0;
  bool first_ = true;
};

}  // namespace lockstep
