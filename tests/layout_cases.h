#pragma once
// The layouts of data parallelism, as a table of choices, and how one of them is compared with one
// rank.

#include "01_single_gpu/recompute.h"
#include "tests/layout.h"

namespace lockstep {

struct LayoutCase {
  int ranks;
  Sync sync;
  int accumulation;
  Recompute recompute;
  bool tied;

  std::string name() const {
    constexpr const char* kKinds[] = {"none", "selective", "full"};
    return text("DP", ranks, "_", name_of(sync), "_accumulation", accumulation, "_recompute_",
                kKinds[size_t(recompute)], tied ? "_tied" : "");
  }
};

inline constexpr int kRanks[] = {1, 2, 3, 4, 8};
inline constexpr int kAccumulations[] = {1, 3};
inline constexpr Recompute kRecomputes[] = {Recompute::None, Recompute::Selective, Recompute::Full};

inline LayoutRig::Settings settings_of(const LayoutCase& c) {
  LayoutRig::Settings s;
  s.config.tied = c.tied;
  s.sync = c.sync;
  s.parallel.bucket_bytes = 3000;  // several buckets
  s.more = [kind = c.recompute](Parts& parts) { use_recomputation(parts, kind); };
  return s;
}

// Every kind of mistake that ranks can make is looked for: different calls, and buffers that change
// while they travel. And all of them would get through if none ran ahead.
inline void expect_one_rank(const LayoutCase& c, const Trained& one, int steps) {
  SCOPED_TRACE(c.name());
  Trained many = train(c.ranks, settings_of(c), c.accumulation, steps,
                       {.time_limit = 10, .check_calls = true, .check_buffers = true});
  expect_same(many, one);
  EXPECT_EQ(strict_order(many.ledgers), "");
}

// One rank, the whole batch at once, nothing recomputed.
inline Trained one_rank(bool tied, int steps) {
  return train(1, settings_of({1, Sync::Naive, 1, Recompute::None, tied}), 1, steps);
}

}  // namespace lockstep
