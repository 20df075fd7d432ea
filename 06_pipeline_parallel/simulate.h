#pragma once
// What a schedule takes, worked out from the times of its actions. An action begins when its rank
// is free and what it needs has come; nobody waits for a message to leave.
//
//     rank 0   F0 F1 .  .  .  B0    B1         span of rank 0: all of the step, idle 3 of 9
//     rank 1   .  F0 B0    F1 B1    .  .       span of rank 1: 6, idle 0 of 6
//
// "How large is the bubble" has several answers, and texts differ in which one they give:
//
//     on its span     1 - busy / (its last action's end - its first one's begin), of each rank:
//                     what the schedule loses when steps follow each other without a stop
//     on the clock    1 - busy / (end of the step - its begin), of each rank or of all together:
//                     (p - 1)/(m + p - 1) for 1F1B; what is lost when all ranks stop between steps
//     of the ideal    idle / busy, of all ranks: (p - 1)/m for 1F1B; not a share: it can exceed 1
//
// A measured timeline has the same shape as a simulated one: the same functions judge both.

#include <cmath>
#include <map>

#include "06_pipeline_parallel/plan.h"

namespace lockstep {

struct Times {
  std::vector<double> forward, input, weight;  // of each stage: F, I, W; B takes I and W
  double message = 0;                          // from one rank to another
};
// All of them equal. B = I + W is usually near 2F: two products for each one of forward.
inline Times equal_times(int stages, double forward, double input, double weight,
                         double message = 0) {
  auto all = [stages](double time) { return std::vector<double>(stages, time); };
  return {all(forward), all(input), all(weight), message};
}

inline double duration(const Action& a, int stage, const Times& times) {
  if (a.kind == Action::F) return times.forward[stage];
  return (a.kind != Action::W ? times.input[stage] : 0) +
         (a.kind != Action::I ? times.weight[stage] : 0);
}

struct ActionSpan {
  Action action;
  double begin, end;
};
using Timeline = std::vector<std::vector<ActionSpan>>;  // [rank]

inline Timeline simulate(const Schedule& schedule, const Placement& placement, const Times& times) {
  size_t left = 0;
  for (const auto& actions : schedule) left += actions.size();
  Timeline timeline(schedule.size());
  std::map<Product, double> made;  // when
  while (left > 0) {
    size_t before = left;
    for (size_t rank = 0; rank < schedule.size(); ++rank) {
      auto& spans = timeline[rank];
      while (spans.size() < schedule[rank].size()) {
        const Action& a = schedule[rank][spans.size()];
        double begin = spans.empty() ? 0 : spans.back().end;
        bool waits = false;
        for (const Product& product : needs(a, int(rank), placement)) {
          auto found = made.find(product);
          waits |= found == made.end();
          if (waits) break;
          bool here = placement.rank_of(product.stage) == int(rank);
          begin = std::max(begin, found->second + (here ? 0 : times.message));
        }
        if (waits) break;
        int stage = placement.stage(int(rank), a.chunk);
        spans.push_back({a, begin, begin + duration(a, stage, times)});
        if (a.kind != Action::W) made[{a.kind != Action::F, stage, a.micro}] = spans.back().end;
        --left;
      }
    }
    require(left < before, "this schedule hangs: validate() says where");
  }
  return timeline;
}

struct Idle {
  std::vector<double> busy, on_span, on_clock;  // [rank]: time, share, share
  double step;                                  // from the first begin to the last end
  double of_clock, of_ideal;                    // of all ranks together
};
inline Idle idle(const Timeline& timeline) {
  double begin = INFINITY, end = -INFINITY, sum = 0;
  for (const auto& spans : timeline) {
    require(!spans.empty(), "a timeline in which a rank does nothing has no idle share");
    begin = std::min(begin, spans.front().begin);
    end = std::max(end, spans.back().end);
  }
  Idle out{{}, {}, {}, end - begin, 0, 0};
  for (const auto& spans : timeline) {
    double busy = 0;
    for (const ActionSpan& s : spans) busy += s.end - s.begin;
    out.busy.push_back(busy);
    out.on_span.push_back(1 - busy / (spans.back().end - spans.front().begin));
    out.on_clock.push_back(1 - busy / out.step);
    sum += busy;
  }
  double clock = out.step * double(timeline.size());
  out.of_clock = 1 - sum / clock;
  out.of_ideal = (clock - sum) / sum;
  return out;
}

}  // namespace lockstep
