#pragma once
// Is a schedule right? Asked before anything runs, of data alone:
//
//   - every (chunk, micro-batch) of a rank has one F, and one B or else one I and one W
//   - each kind takes a chunk's micro-batches in order: gradients are then always added up in the
//     same order, and all schedules give the same bits
//   - F comes before B or I, I before W, and nobody waits for what never comes: plan() ends
//   - nor does it hang on a strict backend, where an operation waits for its partners and those of
//     one rank run one at a time
//
// And how many activations a rank holds at once, which is what a schedule costs in memory.

#include <array>
#include <numeric>

#include "06_pipeline_parallel/plan.h"
#include "common/ledger.h"

namespace lockstep {

inline void check_order(const std::vector<Action>& actions, int rank, int chunks, int m) {
  std::vector<std::array<int, 3>> done(chunks);  // [chunk][F, I, W]: B is I and W
  auto take = [&](const Action& a, int kind, const char* name) {
    int& next = done[a.chunk][kind];
    require(a.micro == next, "rank ", rank, ": ", describe(a), " comes where ", name,
            " of micro-batch ", next, next < m ? " should" : " would be one too many");
    ++next;
  };
  for (const Action& a : actions) {
    require(a.chunk >= 0 && a.chunk < chunks, "rank ", rank, ": ", describe(a), ", but there are ",
            chunks, " chunks");
    if (a.kind == Action::F) take(a, 0, "F");
    if (a.kind == Action::I || a.kind == Action::B) take(a, 1, "I or B");
    if (a.kind == Action::W || a.kind == Action::B) take(a, 2, "W or B");
  }
  for (int c = 0; c < chunks; ++c)
    require(done[c] == std::array{m, m, m}, "rank ", rank, ", chunk ", c, ": ", done[c][0], " F, ",
            done[c][1], " I and ", done[c][2], " W (a B is both) for ", m, " micro-batches");
}

// What each rank's ledger would say of the plan's messages.
inline std::vector<std::vector<LedgerEntry>> ledgers_of(const Plan& rounds) {
  std::vector<int> members(rounds.size());
  std::iota(members.begin(), members.end(), 0);
  std::vector<std::vector<LedgerEntry>> ledgers(rounds.size());
  for (size_t rank = 0; rank < rounds.size(); ++rank)
    for (const Round& round : rounds[rank]) {
      if (round.messages.empty()) continue;
      LedgerEntry entry;
      entry.operation = Collective::Exchange, entry.group = "pp", entry.members = members;
      for (const Message& m : round.messages)
        (m.sends ? entry.sends : entry.receives).push_back(m.peer);
      ledgers[rank].push_back(entry);
    }
  return ledgers;
}

inline void check_messages(const Plan& rounds) {
  std::string stuck = strict_order(ledgers_of(rounds));
  require(stuck.empty(), stuck);
}

// Throws a sentence that says what is wrong.
inline void validate(const Schedule& schedule, const Placement& placement, int micro_batches) {
  require(int(schedule.size()) == placement.ranks, "a schedule of ", schedule.size(),
          " ranks cannot run on ", placement.ranks);
  for (int rank = 0; rank < placement.ranks; ++rank)
    check_order(schedule[rank], rank, placement.chunks, micro_batches);
  check_messages(plan(schedule, placement));
}

// Activations of one rank that are alive at once, in stages: a chunk is one of v parts of a rank's
// layers. They live from F to the end of B or W, for W needs them too.
inline double peak_activations(const std::vector<Action>& actions, int chunks) {
  int alive = 0, peak = 0;
  for (const Action& a : actions) {
    if (a.kind == Action::F) peak = std::max(peak, ++alive);
    if (a.kind == Action::B || a.kind == Action::W) --alive;
  }
  return double(peak) / chunks;
}

}  // namespace lockstep
