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

#include <string>
#include <vector>

#include "06_pipeline_parallel/schedule.h"

namespace lockstep {

struct Times {
  std::vector<double> forward, input, weight;  // of each stage: F, I, W; B takes I and W
  double message = 0;                          // from one rank to another
};
// All of them equal. B = I + W is usually near 2F: two products for each one of forward.
Times equal_times(int stages, double forward, double input, double weight, double message = 0);
double duration(const Action& action, int stage, const Times& times);

struct Span {
  Action action;
  double begin, end;
};
using Timeline = std::vector<std::vector<Span>>;  // [rank]

Timeline simulate(const Schedule& schedule, const Placement& placement, const Times& times);

struct Idle {
  std::vector<double> busy, on_span, on_clock;  // [rank]: time, share, share
  double step;                                  // from the first begin to the last end
  double of_clock, of_ideal;                    // of all ranks together
};
Idle idle(const Timeline& timeline);
std::string percent(double share);  // "12.5 %"

// One line per rank, at most 100 columns. Letters are kinds, numbers micro-batches where there is
// room for them; chunks 0, 2, … in capitals, 1, 3, … in small letters; dots are idle.
std::string as_text(const Timeline& timeline);
// rank,action,chunk,micro_batch,begin,end: what a program writes when it measures, and reads here.
std::string as_csv(const Timeline& timeline);
Timeline from_csv(const std::string& csv);
// Pictures below each other on one time axis, each with its name: "planned" and "measured".
struct NamedTimeline {
  std::string name;
  Timeline timeline;
};
std::string as_svg(const std::string& title, const std::string& unit,
                   const std::vector<NamedTimeline>& timelines);

}  // namespace lockstep
