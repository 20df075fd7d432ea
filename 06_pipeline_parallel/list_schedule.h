#pragma once
// A schedule made from times: whenever a rank is free it takes, of the actions that could begin
// now, the one that its rules put first. Nothing is planned ahead, so no single set of rules is
// best; search.h tries many.
//
//     rank 1 is free at 5    could begin    F3     its activation has come
//                                           I0     its gradient has come
//                            takes          I0     rank 0 waits for it
//
// Memory is a limit, counted in chunks. A forward of chunk c leaves room for one of each later
// chunk: otherwise the last chunk could find the memory full, nothing would ever be freed, and the
// ranks would wait for each other for good.

#include <array>

#include "06_pipeline_parallel/plan.h"
#include "06_pipeline_parallel/simulate.h"

namespace lockstep {

struct ListRules {
  std::vector<int> limit;      // [rank] chunks held at once; at least v
  bool forward_first = false;  // F before I; W always comes last
  bool late_forward = true;    // of several F, the one nearest to the loss
  bool late_input = false;     // of several I
  double patience = 0;         // W waits for an F or I that comes within this part of its time
};

inline Schedule list_schedule(const Placement& placement, int m, const Times& times,
                              const ListRules& rules) {
  struct Rank {
    std::vector<std::array<int, 4>> done;  // [chunk][kind]
    double free = 0;
    int held = 0;
  };
  for (int limit : rules.limit)
    require(limit >= placement.chunks, "a rank with ", placement.chunks,
            " chunks must hold as many activations, not ", limit);
  int v = placement.chunks, left = 3 * m * placement.stages();
  std::vector<Rank> ranks(placement.ranks, Rank{std::vector<std::array<int, 4>>(v), 0, 0});
  std::map<Product, double> made;  // when
  Schedule schedule(placement.ranks);

  // When what an action needs will be on its rank; infinity: nobody has begun to make it.
  auto ready = [&](const Action& a, int rank) {
    double when = 0;
    for (const Product& product : needs(a, rank, placement)) {
      auto found = made.find(product);
      if (found == made.end()) return double(INFINITY);
      bool here = placement.rank_of(product.stage) == rank;
      when = std::max(when, found->second + (here ? 0 : times.message));
    }
    return when;
  };
  auto order = [&](const Action& a) {  // the smallest goes first
    if (a.kind == Action::W) return 4 * v + a.chunk;
    bool forward = a.kind == Action::F;
    bool late = forward ? rules.late_forward : rules.late_input;
    return (forward == rules.forward_first ? 0 : 2 * v) + (late ? v - 1 - a.chunk : a.chunk);
  };

  for (double now = 0; left > 0;) {
    double later = INFINITY;  // the next time at which something can change
    for (int r = 0; r < placement.ranks; ++r) {
      Rank& rank = ranks[r];
      if (rank.free > now) {
        later = std::min(later, rank.free);
        continue;
      }
      std::optional<Action> best;
      double soon = INFINITY;  // the first F or I that will be there
      for (int chunk = 0; chunk < v; ++chunk)
        for (auto kind : {Action::F, Action::I, Action::W}) {
          Action a{kind, chunk, rank.done[chunk][kind]};
          bool full = kind == Action::F && rank.held + v - 1 - chunk >= rules.limit[r];
          if (a.micro == m || full) continue;
          double when = ready(a, r);
          if (when > now) soon = std::min(soon, when);
          if (when <= now && (!best || order(a) < order(*best))) best = a;
        }
      later = std::min(later, soon);
      if (!best) continue;
      int stage = placement.stage(r, best->chunk);
      double time = duration(*best, stage, times);
      if (best->kind == Action::W && soon < now + rules.patience * time) continue;
      schedule[r].push_back(*best), ++rank.done[best->chunk][best->kind], --left;
      if (best->kind == Action::F) ++rank.held;
      if (best->kind == Action::W) --rank.held;
      rank.free = now + time;
      later = std::min(later, rank.free);
      if (best->kind != Action::W) made[{best->kind == Action::I, stage, best->micro}] = rank.free;
    }
    require(later < INFINITY || left == 0, "all ranks wait for each other");
    now = later;
  }
  return schedule;
}

}  // namespace lockstep
