#pragma once
// Zero bubble, H1: backward is cut into what the previous rank waits for (I, gradients of inputs)
// and what only the optimizer waits for (W, gradients of weights). I goes up at once; W fills the
// gaps.
//
//     1F1B; B takes I and W
//
//     rank 0   F0 F1 F2 F3 .  .  .  .  .  .  B0    .  B1    .  B2    .  B3
//     rank 1   .  F0 F1 F2 .  .  .  .  B0    F3 B1    .  B2    .  B3    .  .
//     rank 2   .  .  F0 F1 .  .  B0    F2 B1    F3 B2    .  B3    .  .  .  .
//     rank 3   .  .  .  F0 B0    F1 B1    F2 B2    F3 B3    .  .  .  .  .  .
//
//     H1: W of rank r lags r micro-batches behind I
//
//     rank 0   F0 F1 F2 F3 .  .  .  I0 W0 I1 W1 I2 W2 I3 W3
//     rank 1   .  F0 F1 F2 .  .  I0 F3 I1 W0 I2 W1 I3 W2 W3
//     rank 2   .  .  F0 F1 .  I0 F2 I1 F3 I2 W0 I3 W1 W2 W3
//     rank 3   .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3
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
