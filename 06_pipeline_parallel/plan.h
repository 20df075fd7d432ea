#pragma once
// From a schedule to messages. A schedule says what each rank computes; what has to travel follows
// from it. plan() plays all ranks in lock step, one action a round, and whatever an action makes
// for another rank is sent in that very round, by one side, and received in that very round, by
// the other side:
//
//     round      0            1            2            3
//     rank 0     F0 ──╮       F1 ──╮            ╭─      B0         each rank's messages of a round
//     rank 1          ╰─      F0   ╰─      B0 ──╯       F1         are one group, posted together
//
// So both sides have the same messages in the same order by construction, and no schedule writes
// down a single one. If no rank can move, the schedule would hang: plan() says so before anything
// runs. The fold of a V joins two chunks of one rank, and costs no message.

#include <algorithm>
#include <optional>
#include <set>

#include "06_pipeline_parallel/schedule.h"

namespace lockstep {

struct Message {
  bool sends;
  int peer;        // rank
  bool gradient;   // or activation
  int stage;       // that produced it
  int chunk_here;  // of this rank: the one that produced it, or that needs it
  int micro;
  bool operator==(const Message&) const = default;
};
struct Round {
  std::optional<Action> action;
  std::vector<Message> messages;  // after the action
};
using Plan = std::vector<std::vector<Round>>;  // [rank][round]

inline std::string describe(const Action& a) {
  const char* kinds[] = {"F", "B", "I", "W"};
  return text(kinds[a.kind], " of chunk ", a.chunk, ", micro-batch ", a.micro);
}

// What one stage makes of one micro-batch: an activation, or the gradient of its input.
struct Product {
  bool gradient;
  int stage, micro;
  auto operator<=>(const Product&) const = default;
};

// What must be there before an action can begin. Of W the second one is made by its own I.
inline std::vector<Product> needs(const Action& a, int rank, const Placement& placement) {
  int stage = placement.stage(rank, a.chunk);
  if (a.kind == Action::W) return {{true, stage, a.micro}};
  if (a.kind == Action::F) {
    if (stage == 0) return {};
    return {{false, stage - 1, a.micro}};
  }
  std::vector<Product> of{{false, stage, a.micro}};  // its own forward
  if (stage + 1 < placement.stages()) of.push_back({true, stage + 1, a.micro});
  return of;
}

// The stage that waits for what an action makes, if it is one of another rank.
inline std::optional<int> receiver(const Action& a, int rank, const Placement& placement) {
  if (a.kind == Action::W) return {};
  int next = placement.stage(rank, a.chunk) + (a.kind == Action::F ? 1 : -1);
  if (next < 0 || next == placement.stages() || placement.rank_of(next) == rank) return {};
  return next;
}

inline std::string who_waits(const Schedule& schedule, const std::vector<size_t>& next,
                             const std::set<Product>& made, const Placement& placement) {
  std::string out;
  for (size_t rank = 0; rank < schedule.size(); ++rank) {
    if (next[rank] == schedule[rank].size()) continue;
    const Action& a = schedule[rank][next[rank]];
    for (const Product& product : needs(a, int(rank), placement))
      if (!made.contains(product))
        out += text(out.empty() ? "" : "; ", "rank ", rank, " at ", describe(a), " waits for the ",
                    product.gradient ? "gradient" : "activation", " of stage ", product.stage,
                    " on rank ", placement.rank_of(product.stage));
  }
  return out;
}

inline Plan plan(const Schedule& schedule, const Placement& placement) {
  size_t ranks = schedule.size(), left = 0;
  for (const auto& actions : schedule) left += actions.size();
  Plan rounds(ranks);
  std::vector<size_t> next(ranks, 0);
  std::set<Product> made;  // in earlier rounds
  while (left > 0) {
    for (auto& r : rounds) r.emplace_back();
    size_t before = left;
    std::vector<Product> fresh;
    for (size_t r = 0; r < ranks; ++r) {
      if (next[r] == schedule[r].size()) continue;
      const Action& a = schedule[r][next[r]];
      auto there = [&](const Product& product) { return made.contains(product); };
      std::vector<Product> wanted = needs(a, int(r), placement);
      if (!std::all_of(wanted.begin(), wanted.end(), there)) continue;
      ++next[r], --left;
      rounds[r].back().action = a;
      if (a.kind == Action::W) continue;
      bool gradient = a.kind != Action::F;
      int stage = placement.stage(int(r), a.chunk);
      fresh.push_back({gradient, stage, a.micro});
      if (auto to = receiver(a, int(r), placement)) {
        int peer = placement.rank_of(*to);
        rounds[r].back().messages.push_back({true, peer, gradient, stage, a.chunk, a.micro});
        rounds[peer].back().messages.push_back(
            {false, int(r), gradient, stage, placement.chunk_of(*to), a.micro});
      }
    }
    require(left < before, "this schedule hangs: ", who_waits(schedule, next, made, placement));
    made.insert(fresh.begin(), fresh.end());
  }
  return rounds;
}

}  // namespace lockstep
