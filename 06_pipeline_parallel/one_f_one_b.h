#pragma once
// One forward, one backward: a micro-batch comes back as soon as it can. Each rank first does as
// many forwards as it takes the first micro-batch to return, then one of each in turn. (B is drawn
// as long as F.)
//
//     rank 0   F0 F1 F2 F3 .  .  .  B0 .  B1 .  B2 .  B3
//     rank 1   .  F0 F1 F2 .  .  B0 F3 B1 .  B2 .  B3 .
//     rank 2   .  .  F0 F1 .  B0 F2 B1 F3 B2 .  B3 .  .
//     rank 3   .  .  .  F0 B0 F1 B1 F2 B2 F3 B3 .  .  .
//
// Cost: idles exactly as long as all-forward-all-backward. What it saves is memory: rank r holds
// min(m, p - r) activations, however large m is, and so m may grow until the idle share is small.
//
// Narayanan et al., "PipeDream" (2019), with flushes as in "Efficient large-scale language model
// training on GPU clusters" (2021).

#include <algorithm>

#include "06_pipeline_parallel/schedule.h"

namespace lockstep {

inline Schedule one_f_one_b(int p, int m) {
  Schedule schedule(p);
  for (int rank = 0; rank < p; ++rank) {
    auto& actions = schedule[rank];
    int warm_up = std::min(m, p - 1 - rank);
    for (int i = 0; i < warm_up; ++i) actions.push_back({Action::F, 0, i});
    for (int i = 0; i < m; ++i) {
      if (warm_up + i < m) actions.push_back({Action::F, 0, warm_up + i});
      actions.push_back({Action::B, 0, i});
    }
  }
  return schedule;
}

}  // namespace lockstep
