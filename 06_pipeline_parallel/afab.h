#pragma once
// All forward, all backward (GPipe): the micro-batches go down the stages one after the other, and
// when the last one is through, they come back.
//
//     rank 0   F0 F1 F2 F3 .  .  .  .  .  .  B0 B1 B2 B3      p = 4 ranks, m = 4 micro-batches
//     rank 1   .  F0 F1 F2 F3 .  .  .  .  B0 B1 B2 B3 .
//     rank 2   .  .  F0 F1 F2 F3 .  .  B0 B1 B2 B3 .  .
//     rank 3   .  .  .  F0 F1 F2 F3 B0 B1 B2 B3 .  .  .
//
// Cost: every rank idles for p - 1 of m + p - 1 steps, (p - 1)/m of what it computes. It holds all
// m activations at once, which is what keeps m from growing.
//
// Huang et al., "GPipe" (2019); The Ultra-Scale Playbook (Hugging Face 2025), "Pipeline
// parallelism".

#include "06_pipeline_parallel/schedule.h"

namespace lockstep {

inline Schedule afab(int p, int m) {
  Schedule schedule(p);
  for (auto& actions : schedule) {
    for (int i = 0; i < m; ++i) actions.push_back({Action::F, 0, i});
    for (int i = 0; i < m; ++i) actions.push_back({Action::B, 0, i});
  }
  return schedule;
}

}  // namespace lockstep
