#include "common/optim.h"

#include <cstring>

namespace lockstep {

AdamW::AdamW(std::vector<Owned> owned, UpdateRule rule, Device device, Communicator* world)
    : owned_(std::move(owned)), rule_(rule), world_(world) {
  for (const Owned& o : owned_) {
    DType type = o.master.dtype();
    moments_.push_back({Tensor::zeros(o.master.shape(), type, device, Category::Moments),
                        Tensor::zeros(o.master.shape(), type, device, Category::Moments)});
  }
  StepState start;
  const auto* bytes = reinterpret_cast<const uint8_t*>(&start);
  state_ = Tensor::from(std::vector<uint8_t>(bytes, bytes + sizeof start), {sizeof(StepState)},
                        device, Category::Buffers);
  DType sums = owned_.empty() ? DType::F32 : owned_[0].master.dtype();
  scale_ = Tensor::zeros({1}, sums, device, Category::Buffers);
  squares_ = Tensor::zeros({int64_t(owned_.size())}, DType::F64, device, Category::Buffers);
  sums_ = Tensor::zeros({2}, DType::F64, device, Category::Buffers);
}

void AdamW::begin_step(const Tensor& valid) { on(state_).begin_step(state_, scale_, valid); }

void AdamW::add_loss(const Tensor& loss) { on(state_).add_loss(state_, loss); }

void AdamW::step(const std::function<void(size_t)>& updated) {
  Kernels& k = on(state_);
  std::vector<Tensor> counted;
  for (const Owned& o : owned_) counted.push_back(o.counted ? o.grad : Tensor());
  k.sum_squares(squares_, counted);
  k.local_sums(sums_, state_, squares_);
  if (world_) world_->all_reduce(sums_).wait();
  k.begin_update(state_, sums_, rule_);
  for (size_t i = 0; i < owned_.size(); ++i) {
    const Owned& o = owned_[i];
    k.adamw(o.value, o.master, moments_[i].m, moments_[i].v, o.grad, state_, rule_,
            o.parameter->decays());
    if (updated) updated(i);
  }
}

LateState::LateState() : pinned_(device::available()) {
  for (StepState*& slot : slots_) {
    slot = pinned_ ? static_cast<StepState*>(device::allocate_pinned(sizeof(StepState)))
                   : new StepState;
  }
}

LateState::~LateState() {
  for (StepState* slot : slots_) {
    if (pinned_) {
      device::deallocate_pinned(slot);
    } else {
      delete slot;
    }
  }
}

bool LateState::read(const Tensor& state, StepState& previous) {
  bool known = last(previous);
  size_t slot = size_t(reads_++ % 2);
  device::copy(slots_[slot], Device::CPU, state.raw(), state.device(), sizeof(StepState));
  arrived_[slot].record();
  return known;
}

bool LateState::last(StepState& state) {
  if (reads_ == 0) return false;
  size_t slot = size_t((reads_ - 1) % 2);
  arrived_[slot].wait();
  std::memcpy(&state, slots_[slot], sizeof state);
  return true;
}

}  // namespace lockstep
