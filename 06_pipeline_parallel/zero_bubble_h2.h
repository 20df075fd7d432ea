#pragma once
// Zero bubble, H2: H1 with more forwards before the first backward, until nobody waits for it, and
// W that lags twice as far behind at the end.
//
//     rank 0   F0 F1 F2 F3 F4 F5 F6 I0 W0 I1 W1 I2 W2 I3 W3 I4 W4 I5 W5 I6 W6 .  .  .
//     rank 1   .  F0 F1 F2 F3 F4 I0 F5 I1 F6 I2 W0 I3 W1 I4 W2 I5 W3 I6 W4 W5 W6 .  .
//     rank 2   .  .  F0 F1 F2 I0 F3 I1 F4 I2 F5 I3 F6 I4 W0 I5 W1 I6 W2 W3 W4 W5 W6 .
//     rank 3   .  .  .  F0 I0 F1 I1 F2 I2 F3 I3 F4 I4 F5 I5 F6 I6 W0 W1 W2 W3 W4 W5 W6
//
// 2p - 1 forwards fill the time in which the first micro-batch goes down and up.
//
// Cost: with F = I = W and m >= 2p - 1 no rank ever waits between its first and its last action.
// Ranks do not begin and end together, though: rank r starts r steps after rank 0. An optimizer
// that waits for all of them (a global norm, say) gives those steps back; the paper's optimizer
// looks at the norm afterwards and undoes a step that was wrong. It holds 2p - 1 activations,
// about twice what 1F1B does.
//
// Qi et al., "Zero bubble pipeline parallelism" (2024), section 2.

#include "06_pipeline_parallel/zero_bubble_h1.h"

namespace lockstep {

inline Schedule zero_bubble_h2(int p, int m) {
  Schedule schedule;
  for (int rank = 0; rank < p; ++rank)
    schedule.push_back(with_late_weights(m, 2 * (p - rank) - 1, 2 * rank));
  return schedule;
}

}  // namespace lockstep
