#pragma once
// Interleaved: each rank holds v thin stages (chunks) instead of a thick one, and a micro-batch
// goes v times round the ranks. To fill the pipeline takes p - 1 thin steps, not p - 1 thick ones.
//
//     layers   0 1 | 2 3 | 4 5 | 6 7     one chunk each: ranks 0 1 2 3
//              0   | 1   | 2   | 3       two chunks each, in a loop: rank 0 has layers 0 and 4,
//              4   | 5   | 6   | 7       rank 1 has 1 and 5, …
//
// `group` micro-batches visit chunk 0, then the same ones chunk 1, …, then the next group:
//
//     p = v = 2, m = 4; small letters: chunk 1; B drawn as long as F
//
//     depth first, group = p: a micro-batch is soon through, which takes little memory
//
//     rank 0   F0 F1 f0 f1 F2 b0 F3 b1 f2 B0 f3 B1 .  b2 .  b3 B2 B3
//     rank 1   .  F0 F1 f0 b0 f1 b1 F2 B0 F3 B1 f2 b2 f3 b3 B2 B3 .
//
//     breadth first, group = m: all of a chunk at once; messages have more time, and weights that
//     must be gathered (ZeRO) are gathered once
//
//     rank 0   F0 F1 F2 F3 f0 f1 f2 b0 f3 b1 .  b2 .  b3 B0 B1 B2 B3
//     rank 1   .  F0 F1 F2 F3 f0 b0 f1 b1 f2 b2 f3 b3 B0 B1 B2 B3 .
//
// Llama 3.1 puts the dial between the two.
//
// Cost: idles for (p - 1)/(v m) of what it computes; messages are v times as many: p v - 1
// boundaries instead of p - 1.
//
// Narayanan et al., "Efficient large-scale language model training on GPU clusters" (2021);
// Lamy-Poirier, "Breadth-first pipeline parallelism" (2023); "The Llama 3 herd of models" (2024),
// section 3.3.2.

#include <algorithm>

#include "06_pipeline_parallel/one_f_one_b.h"

namespace lockstep {

inline Schedule interleaved(int p, int v, int m, int group) {
  if (v == 1) return one_f_one_b(p, m);  // a single round: nothing to wait longer for
  require(group >= p && m % group == 0, "an interleaved schedule on ", p, " ranks cannot take ", m,
          " micro-batches in groups of ", group,
          ": a group has at least as many as there are ranks, and divides their number");
  auto kth = [&](Action::Kind kind, int k) {
    int chunk = k % (group * v) / group, micro = k / (group * v) * group + k % group;
    return Action{kind, kind == Action::F ? chunk : v - 1 - chunk, micro};
  };
  Schedule schedule(p);
  for (int rank = 0; rank < p; ++rank) {
    int all = m * v, warm_up = std::min(all, 2 * (p - 1 - rank) + (v - 1) * group);
    for (int k = 0; k < warm_up; ++k) schedule[rank].push_back(kth(Action::F, k));
    for (int k = 0; k < all; ++k) {
      if (warm_up + k < all) schedule[rank].push_back(kth(Action::F, warm_up + k));
      schedule[rank].push_back(kth(Action::B, k));
    }
  }
  return schedule;
}

}  // namespace lockstep
