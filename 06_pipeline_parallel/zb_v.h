#pragma once
// ZB-V: zero bubble in the memory of 1F1B. Each rank holds two chunks in a V, so that the last
// stage is on rank 0, and the first micro-batch comes back to where it started:
//
//     rank 0    stages 0 7        F: forward of the left chunk     I W: backward of it
//     rank 1           1 6        f: of the right one              i w
//     rank 2           2 5
//     rank 3           3 4
//
//     rank 0   F F F F F F F f i w f i w f i w f i w F I W f i w F I W …
//     rank 3   .  .  .  F f F f F f F f i w F I W f i w …           (p = 4)
//
// A rank first fills its memory: 2p chunks, as much as p stages of 1F1B. From then on each backward
// frees what the next forward takes. At the end W fills what I leaves free.
//
// Cost: with F = I = W and m >= 2p - 1 no rank waits between its first and its last action. The
// fold of the V costs no message; there are 2p - 2 boundaries.
//
// Qi et al., "Pipeline parallelism with controllable memory" (2024), figure 3; PyTorch's
// ScheduleZBVZeroBubble has this order too.

#include <algorithm>

#include "06_pipeline_parallel/schedule.h"

namespace lockstep {

inline Schedule zb_v(int p, int m) {
  Schedule schedule(p);
  for (int rank = 0; rank < p; ++rank) {
    int full = std::max(m, 2 * p - 1);  // with fewer micro-batches: the same, less those not there
    int done[2][Action::W + 1] = {};    // of each chunk, how many of each kind
    auto next = [&](Action::Kind kind, int chunk) {
      int micro = done[chunk][kind]++;
      if (micro < m) schedule[rank].push_back({kind, chunk, micro});
    };
    auto backward = [&](int chunk) { next(Action::I, chunk), next(Action::W, chunk); };

    for (int i = 0; i < 2 * (p - rank) - 1; ++i) next(Action::F, 0);
    for (int i = 0; i < rank; ++i) next(Action::F, 1), next(Action::F, 0);
    for (int i = 0; i < p - rank; ++i) next(Action::F, 1), backward(1);
    while (done[1][Action::F] < full) {
      if (done[0][Action::F] < full) next(Action::F, 0);
      backward(0), next(Action::F, 1), backward(1);
    }
    for (int i = 0; i < rank; ++i) next(Action::I, 0), next(Action::I, 1);
    for (int i = 0; i < p - rank; ++i) backward(0);
    for (int chunk : {1, 0})
      while (done[chunk][Action::W] < full) next(Action::W, chunk);
  }
  return schedule;
}

}  // namespace lockstep
