#pragma once
// Zero bubble, H1: backward is cut into what the previous rank waits for (I, gradients of inputs)
// and what only the optimizer waits for (W, gradients of weights). I goes up at once; W fills the
// gaps.
//
//     rank 0   F0 F1 F2 F3 .  .  .  I0 W0 .  I1 W1 .  I2 W2 .  I3 W3     1F1B, B cut in place
//     rank 3   .  .  .  F0 I0 W0 F1 I1 W1 F2 I2 W2 F3 I3 W3 .  .  .
//
//     rank 0   F0 F1 F2 F3 .  .  I0 W0 I1 W1 I2 W2 I3 W3                 H1
//     rank 3   .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3              rank r: W lags r behind I
//
// Cost: idles for (p - 1)(F + I - W) instead of (p - 1)(F + I + W), a third if all three are equal,
// and m >= p. It holds no more than 1F1B: p activations.
//
// Qi et al., "Zero bubble pipeline parallelism" (2024), section 2.

#include <algorithm>

#include "06_pipeline_parallel/schedule.h"

namespace lockstep {

// One rank: `warm_up` forwards, then I and F in turn, W `lag` micro-batches behind I.
inline std::vector<Action> with_late_weights(int m, int warm_up, int lag) {
  std::vector<Action> actions;
  int forwards = 0, weights = 0;
  while (forwards < std::min(m, warm_up)) actions.push_back({Action::F, 0, forwards++});
  for (int i = 0; i < m; ++i) {
    actions.push_back({Action::I, 0, i});
    if (i >= lag) actions.push_back({Action::W, 0, weights++});
    if (forwards < m) actions.push_back({Action::F, 0, forwards++});
  }
  while (weights < m) actions.push_back({Action::W, 0, weights++});
  return actions;
}

inline Schedule zero_bubble_h1(int p, int m) {
  Schedule schedule;
  for (int rank = 0; rank < p; ++rank) schedule.push_back(with_late_weights(m, p - rank, rank));
  return schedule;
}

}  // namespace lockstep
