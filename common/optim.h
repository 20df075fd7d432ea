#pragma once
// AdamW over what this rank owns, with global-norm clipping and the learning-rate schedule. All of
// a step's numbers stay on the device (step_state.h); the host reads them one step late.

#include <array>
#include <functional>

#include "common/comm.h"
#include "common/device.h"
#include "common/strategy.h"

namespace lockstep {

// Reads a StepState without stopping the device: read() starts a copy and returns the numbers of
// the read before, which have long arrived.
class LateState {
 public:
  LateState();
  ~LateState();
  LateState(const LateState&) = delete;
  // The state as of the previous call (false at the first call), then starts copying `state`.
  bool read(const Tensor& state, StepState& previous);
  bool last(StepState& state);  // waits for the copy that read() started

 private:
  std::array<StepState*, 2> slots_{};
  std::array<device::Event, 2> arrived_;
  bool pinned_ = false;
  int64_t reads_ = 0;
};

class AdamW {
 public:
  // world: all ranks of the job, which must agree on loss and norm; null: this is the only one.
  AdamW(std::vector<Owned> owned, UpdateRule rule, Device device, Communicator* world = nullptr);

  // Before the first micro-batch. valid [1] I64: targets of the global batch that are not ignored,
  // summed over ranks.
  void begin_step(const Tensor& valid);
  const Tensor& scale() const { return scale_; }  // [1]: 1 / valid, the factor of every loss
  // Of a micro-batch, already divided by the step's tokens; of ranks that know the same loss, one
  // adds it.
  void add_loss(const Tensor& loss);
  // Norm, clip, update; see begin_update(). Leaves everything alone if the step is to be skipped.
  // updated(i): owned()[i] has its new value, while later ones still wait for theirs.
  void step(const std::function<void(size_t)>& updated = {});

  const Tensor& state() const { return state_; }  // one StepState, on the device
  struct Moments {
    Tensor m, v;
  };
  const std::vector<Moments>& moments() const { return moments_; }
  const std::vector<Owned>& owned() const { return owned_; }
  const UpdateRule& rule() const { return rule_; }

 private:
  std::vector<Owned> owned_;
  std::vector<Moments> moments_;
  UpdateRule rule_;
  Tensor state_, scale_;
  Tensor squares_;  // [owned] F64: sum of squares of each gradient
  Tensor sums_;     // [2] F64: loss and squared norm, of all ranks
  Communicator* world_;
};

}  // namespace lockstep
