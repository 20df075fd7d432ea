#pragma once
// How much of their communication the steps of a run stood still for (overlap_meter.h).
// The first step, and what runs between steps (evaluation, checks, checkpoints), are left out.
//
//   communication 280.9 ms a step, 14.0 ms of it exposed (5.0 %)
//   exposed 2.8 to 14.0 ms, by rank: the first to come waits for the last
//
// The first line is rank 0's. The last to come waits for nobody, so the least of all ranks is what
// communication itself costs; the rest is that ranks, or their GPUs, are not equally fast.

#include <cstdio>
#include <utility>

#include "common/comm.h"
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

  void show(Communicator& world) {  // collective; rank 0 prints
    device::synchronize();
    add();
    Tensor ends = Tensor::from<double>({sum_.exposed, -sum_.exposed}, {2}, meter_.device(),
                                       Category::Buffers);
    world.all_reduce(ends, ReduceOp::Max).wait();
    std::vector<double> seconds = ends.values<double>();
    if (world.rank() > 0 || sum_.operations == 0 || steps_ == 0) return;
    double ms = 1e3 / double(steps_), most = seconds[0] * ms, least = -seconds[1] * ms;
    std::printf("%s\n", line(sum_, steps_).c_str());
    std::printf("exposed %.1f to %.1f ms, by rank: the first to come waits for the last\n", least,
                most);
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
