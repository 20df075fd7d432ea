#pragma once
// The numbers of a training step that the host does not wait for: they live in device memory,
// kernels read and write them, and the host looks at them one step late. Without this every step
// would stop the GPU to ask "how large is the gradient?" before it may scale it.

#include <cmath>
#include <cstdint>

#include "common/dtype.h"

namespace lockstep {

struct StepState {
  double loss = 0;           // of this step: summed over micro-batches, already divided by tokens
  double gradient_norm = 0;  // before clipping, over all parameters
  int64_t updates = 0;       // optimizer updates done: AdamW's t, and the schedule's k
  int64_t valid_tokens = 0;  // targets of this step's global batch that are not ignored
  float learning_rate = 0;
  float clip = 1;              // factor on every gradient
  float bias1 = 1, bias2 = 1;  // 1 - beta^t
  int32_t skip = 0;            // this step leaves the weights alone
  int32_t stopped = 0;  // a loss or gradient was not finite: no step after it changes anything
};

// Linear warm-up to `peak`, then a cosine down to `floor` * peak. k counts optimizer updates from
// 1; micro-batches and ranks do not appear in it.
struct LearningRateSchedule {
  double peak = 1e-3, floor = 0.1;
  int64_t warmup = 0, total = 0;  // total 0: constant after the warm-up
  LOCKSTEP_BOTH double at(int64_t k) const {
    if (k <= warmup) return peak * double(k) / double(warmup);
    if (total <= warmup) return peak;
    double progress = double(k - warmup) / double(total - warmup);
    if (progress > 1) progress = 1;
    return peak * (floor + (1 - floor) * 0.5 * (1 + cos(3.14159265358979323846 * progress)));
  }
};

// AdamW with decoupled weight decay: Loshchilov and Hutter, "Decoupled weight decay regularization"
// (ICLR 2019), algorithm 2, and clipping by the global norm.
struct UpdateRule {
  LearningRateSchedule schedule;
  float beta1 = 0.9f, beta2 = 0.95f, epsilon = 1e-8f, weight_decay = 0.1f;
  float max_norm = 1.0f;  // 0: no clipping
};

// Runs once per step, after the norm is known and before any weight changes.
LOCKSTEP_BOTH inline void begin_update(StepState& s, double norm_squared, const UpdateRule& rule) {
  s.gradient_norm = sqrt(norm_squared);
  bool finite = s.gradient_norm - s.gradient_norm == 0 && s.loss - s.loss == 0;  // inf - inf is NaN
  if (!finite) s.stopped = 1;
  s.skip = s.stopped || s.valid_tokens == 0;  // nothing to learn from: not even weight decay
  if (s.skip) return;
  s.updates += 1;
  s.learning_rate = float(rule.schedule.at(s.updates));
  bool clips = rule.max_norm > 0 && s.gradient_norm > rule.max_norm;
  s.clip = clips ? float(rule.max_norm / s.gradient_norm) : 1.0f;
  s.bias1 = float(1 - pow(double(rule.beta1), double(s.updates)));
  s.bias2 = float(1 - pow(double(rule.beta2), double(s.updates)));
}

// One element of AdamW, in the precision T of the master weight.
template <class T>
LOCKSTEP_BOTH inline void adamw_element(T& weight, T& m, T& v, T gradient, float decay,
                                        const StepState& s, const UpdateRule& rule) {
  T g = gradient * T(s.clip);
  m = T(rule.beta1) * m + (T(1) - T(rule.beta1)) * g;
  v = T(rule.beta2) * v + (T(1) - T(rule.beta2)) * g * g;
  T step = (m / T(s.bias1)) / (T(sqrt(v / T(s.bias2))) + T(rule.epsilon));
  weight -= T(s.learning_rate) * (step + T(decay) * weight);
}

}  // namespace lockstep
