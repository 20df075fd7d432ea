#pragma once
// The best order for stages that are not equal, as measured ones never are: the last stage has the
// head, W is shorter than I, messages take time. Finding the very best is an integer programme;
// this tries some hundred candidates and keeps the one with the shortest step:
//
//     every named schedule that has this placement           so the result is never worse
//     list_schedule() under each set of rules                F or I first, which chunk first, how
//                                                            patient, how much memory to use
//
// all under a limit of memory, and judged by simulate(). More memory helps until the first backward
// comes back, and not beyond.

#include "06_pipeline_parallel/list_schedule.h"
#include "06_pipeline_parallel/schedules.h"
#include "06_pipeline_parallel/validate.h"

namespace lockstep {

struct Found {
  std::string name;
  Schedule schedule;
  double step = INFINITY, peak = 0;  // time; activations of stages on the busiest rank
  int tried = 0;
};

inline double peak_activations(const Schedule& schedule, int chunks) {
  double peak = 0;
  for (const auto& actions : schedule) peak = std::max(peak, peak_activations(actions, chunks));
  return peak;
}

// The named schedules with this placement; interleaved at every position of its dial.
inline std::vector<std::pair<std::string, Schedule>> named_schedules(const Placement& placement,
                                                                     int m) {
  int p = placement.ranks, v = placement.chunks;
  if (placement.shape == Placement::V) {
    std::vector<std::pair<std::string, Schedule>> out{{"zb-v", zb_v(p, m)}};
    if (m >= 2 * p) out.push_back({"dualpipe-v", dualpipe_v(p, m)});
    return out;
  }
  if (v == 1)
    return {{"afab", afab(p, m)},
            {"1f1b", one_f_one_b(p, m)},
            {"zb-h1", zero_bubble_h1(p, m)},
            {"zb-h2", zero_bubble_h2(p, m)}};
  std::vector<std::pair<std::string, Schedule>> out;
  for (int group = p; group <= m; group += p)
    if (m % group == 0) out.push_back({text("interleaved ", group), interleaved(p, v, m, group)});
  return out;
}

// limit: activations of stages (of v chunks each) that a rank can hold.
inline Found search(const Placement& placement, int m, const Times& times, double limit) {
  int v = placement.chunks, room = int(std::min(limit, double(m)) * v);
  require(room >= v, "--memory ", limit, " has no room for one micro-batch on each stage");
  Found best;
  auto judge = [&](const std::string& name, Schedule schedule) {
    double peak = peak_activations(schedule, v);
    if (peak > limit) return;
    double step = idle(simulate(schedule, placement, times)).step;
    ++best.tried;
    // Differences of rounding are none; of equal steps the one with less memory is better.
    double little = 1e-9 * step;
    if (step < best.step - little || (step < best.step + little && peak < best.peak))
      best = {name, std::move(schedule), step, peak, best.tried};
  };
  for (auto& [name, schedule] : named_schedules(placement, m)) judge(name, schedule);
  for (int chunks = v; chunks <= room; ++chunks)
    for (bool forward_first : {false, true})
      for (int late = 0; late < (v == 1 ? 1 : 4); ++late)
        for (double patience : {0.0, 0.5, 1.0}) {
          ListRules rules{std::vector<int>(placement.ranks, chunks), forward_first, late % 2 == 1,
                          late / 2 == 1, patience};
          std::string name = text("list of ", forward_first ? "F, I, W" : "I, F, W", ", ", chunks,
                                  " chunks, patience ", patience);
          judge(name, list_schedule(placement, m, times, rules));
        }
  return best;
}

}  // namespace lockstep
