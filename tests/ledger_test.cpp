// Byte counts against numbers worked out by hand, and which programs would get stuck on a backend
// that lets no rank run ahead.

#include "common/ledger.h"

#include <gtest/gtest.h>

#include <random>

#include "common/formulas.h"
#include "tests/temporary.h"

namespace lockstep {
namespace {

using enum Collective;
using Ledgers = std::vector<std::vector<LedgerEntry>>;

TEST(Ledger, WireBytesOfEveryOperation) {
  EXPECT_EQ(wire_bytes(AllReduce, 1200, 4), 1800);  // 2 * 3 messages of 300
  EXPECT_EQ(wire_bytes(AllReduce, 1200, 3), 1600);
  EXPECT_EQ(wire_bytes(ReduceScatter, 1200, 4), 900);
  EXPECT_EQ(wire_bytes(AllGather, 1200, 4), 900);
  EXPECT_EQ(wire_bytes(Broadcast, 1200, 4), 1200);
  EXPECT_EQ(wire_bytes(Reduce, 1200, 4), 1200);
  EXPECT_EQ(wire_bytes(Gather, 1200, 4), 300);   // a shard to the root
  EXPECT_EQ(wire_bytes(Scatter, 1200, 4), 900);  // the root keeps its own
  EXPECT_EQ(wire_bytes(AllToAll, 1200, 4), 900);
  EXPECT_EQ(wire_bytes(Exchange, 1200, 4), 1200);
  EXPECT_EQ(wire_bytes(Barrier, 0, 4), 0);
  for (Collective c : {AllReduce, Reduce, Broadcast, AllGather, ReduceScatter, Gather, Scatter,
                       AllToAll, Exchange, Barrier})
    EXPECT_EQ(wire_bytes(c, 1200, 1), 0) << name_of(c);
  expect_refusal([] { wire_bytes(AllReduce, -1, 4); }, {"-1"});
  expect_refusal([] { wire_bytes(AllReduce, 1, 0); }, {"0 ranks"});
}

TEST(Ledger, WireBytesOfSizesThatRanksDoNotDivide) {
  EXPECT_EQ(wire_bytes(AllReduce, 10, 4), 15);     // 2 * 10 * 3/4 exactly
  EXPECT_EQ(wire_bytes(AllReduce, 10, 3), 14);     // 13.33: the mean, rounded up
  EXPECT_EQ(wire_bytes(ReduceScatter, 10, 3), 7);  // 6.67
  EXPECT_EQ(wire_bytes(AllReduce, 1, 8), 2);       // 1.75
  for (int64_t k = 0; k < 200; ++k)
    for (int64_t n = 2; n <= 9; ++n)
      EXPECT_EQ(wire_bytes(AllReduce, k, int(n)), (2 * k * (n - 1) + n - 1) / n) << k << " " << n;
  int64_t large = int64_t(1) << 61;  // times 8 it would overflow
  EXPECT_EQ(wire_bytes(AllReduce, large, 8), large / 8 * 14);
}

LedgerEntry entry(Collective operation, std::vector<int> members, std::string group = "world") {
  LedgerEntry e;
  e.operation = operation;
  e.group = std::move(group);
  e.members = std::move(members);
  return e;
}

TEST(Ledger, SumsByOperationGroupAndPhase) {
  Ledger ledger;
  auto write = [&](Collective c, const char* group, int64_t payload) {
    LedgerEntry e = entry(c, {0, 1}, group);
    e.payload = payload;
    e.wire = payload / 2;
    ledger.write(e);
  };
  ledger.set_phase("forward");
  ledger.set_step(3);
  write(AllReduce, "tp", 100);
  write(AllGather, "tp", 50);
  ledger.set_phase("backward");
  write(AllReduce, "tp", 8);
  write(AllReduce, "dp", 4);
  auto expect = [](Ledger::Sum sum, int64_t calls, int64_t payload) {
    EXPECT_EQ(sum.calls, calls);
    EXPECT_EQ(sum.payload, payload);
    EXPECT_EQ(sum.wire, payload / 2);
  };
  expect(ledger.sum(AllReduce), 3, 112);
  expect(ledger.sum(AllReduce, "tp"), 2, 108);
  expect(ledger.sum(AllReduce, "tp", "forward"), 1, 100);
  expect(ledger.sum(AllReduce, "", "backward"), 2, 12);
  expect(ledger.sum(Broadcast), 0, 0);
  expect(ledger.sum(), 4, 162);
  EXPECT_EQ(ledger.entries()[1].phase, "forward");
  EXPECT_EQ(ledger.entries()[1].step, 3);
  ledger.clear();
  expect(ledger.sum(), 0, 0);
}

LedgerEntry exchange(std::vector<int> members, std::vector<int> sends, std::vector<int> receives) {
  LedgerEntry e = entry(Exchange, std::move(members), "ring");
  e.sends = std::move(sends);
  e.receives = std::move(receives);
  return e;
}

std::vector<int> everyone(int n) {
  std::vector<int> all;
  for (int r = 0; r < n; ++r) all.push_back(r);
  return all;
}

// A ring in which everyone sends to the right: how(rank, right, left) is what one rank does.
template <class How>
std::string ring(int n, How how) {
  Ledgers ledgers;
  for (int r = 0; r < n; ++r) ledgers.push_back(how(r, (r + 1) % n, (r + n - 1) % n));
  return strict_order(ledgers);
}

TEST(StrictOrder, C11_BlockingRingIsStuckAndAGroupedOneIsNot) {
  for (int n : {2, 3, 4, 8}) {
    std::vector<int> all = everyone(n);
    std::string stuck = ring(n, [&](int, int right, int left) -> std::vector<LedgerEntry> {
      return {exchange(all, {right}, {}), exchange(all, {}, {left})};
    });
    EXPECT_NE(stuck.find(text(n, " of ", n, " ranks are stuck")), std::string::npos) << stuck;
    EXPECT_NE(stuck.find("rank 0 at its operation 0, exchange in \"ring\", sending to 1"),
              std::string::npos)
        << stuck;
    EXPECT_EQ(ring(n,
                   [&](int, int right, int left) -> std::vector<LedgerEntry> {
                     return {exchange(all, {right}, {left}), exchange(all, {right}, {left})};
                   }),
              "");
    // The classic way out without groups: one rank receives first, and the chain unwinds.
    EXPECT_EQ(ring(n,
                   [&](int r, int right, int left) -> std::vector<LedgerEntry> {
                     LedgerEntry send = exchange(all, {right}, {}),
                                 receive = exchange(all, {}, {left});
                     return r == 0 ? std::vector{receive, send} : std::vector{send, receive};
                   }),
              "");
  }
}

TEST(StrictOrder, CollectivesOfTwoGroupsInOppositeOrderAreStuck) {
  LedgerEntry tp = entry(AllReduce, {0, 1}, "tp"), dp = entry(AllReduce, {0, 1}, "dp");
  EXPECT_EQ(strict_order({{tp, dp}, {tp, dp}}), "");
  std::string stuck = strict_order({{tp, dp}, {dp, tp}});
  EXPECT_NE(stuck.find("rank 0 at its operation 0, all_reduce in \"tp\""), std::string::npos);
  EXPECT_NE(stuck.find("rank 1 at its operation 0, all_reduce in \"dp\""), std::string::npos);
}

// Four ranks as a square, rows "tp" and columns "dp": no rank sees the circle of waiting.
TEST(StrictOrder, CircleOverFourRanksIsFound) {
  LedgerEntry top = entry(AllReduce, {0, 1}, "tp"), bottom = entry(AllReduce, {2, 3}, "tp");
  LedgerEntry left = entry(AllReduce, {0, 2}, "dp"), right = entry(AllReduce, {1, 3}, "dp");
  EXPECT_EQ(strict_order({{top, left}, {top, right}, {bottom, left}, {bottom, right}}), "");
  EXPECT_EQ(strict_order({{top, left}, {top, right}, {left, bottom}, {bottom, right}}), "");
  EXPECT_EQ(strict_order({{top, left}, {right, top}, {left, bottom}, {bottom, right}}),
            "in strict order 4 of 4 ranks are stuck: rank 0 at its operation 0, all_reduce in "
            "\"tp\"; rank 1 at its operation 0, all_reduce in \"dp\"; rank 2 at its operation 0, "
            "all_reduce in \"dp\"; rank 3 at its operation 0, all_reduce in \"tp\"");
}

TEST(StrictOrder, DifferentOperationsAndMissingOnesAreFound) {
  LedgerEntry reduce = entry(AllReduce, {0, 1}), gather = entry(AllGather, {0, 1});
  EXPECT_NE(strict_order({{reduce}, {gather}}), "");
  std::string stuck = strict_order({{reduce, gather}, {reduce}});
  EXPECT_NE(stuck.find("1 of 2 ranks are stuck: rank 0 at its operation 1, all_gather"),
            std::string::npos)
      << stuck;
  LedgerEntry root0 = entry(Broadcast, {0, 1}), root1 = root0;
  root0.root = 0, root1.root = 1;
  EXPECT_NE(strict_order({{root0}, {root1}}), "");
  EXPECT_EQ(strict_order({{entry(Barrier, {0})}, {}}), "");  // a group of one waits for nobody
  EXPECT_EQ(strict_order({}), "");
}

TEST(StrictOrder, EveryMessageNeedsItsPartner) {
  std::vector<int> all = everyone(3);
  auto to = [&](std::vector<int> peers) { return exchange(all, std::move(peers), {}); };
  auto from = [&](std::vector<int> peers) { return exchange(all, {}, std::move(peers)); };
  EXPECT_EQ(strict_order({{to({1, 1})}, {from({0}), from({0})}, {}}), "");
  EXPECT_NE(strict_order({{to({1, 1})}, {from({0})}, {}}), "");
  EXPECT_NE(strict_order({{to({1})}, {from({0, 0})}, {}}), "");
  EXPECT_NE(strict_order({{to({1})}, {}, {}}), "");
  EXPECT_EQ(strict_order({{exchange(all, {}, {})}, {}, {}}), "");
  // A group to two peers, one of whom has something else to do first.
  LedgerEntry pair = entry(AllReduce, {1, 2}, "pair");
  EXPECT_EQ(strict_order({{to({1, 2})}, {from({0}), pair}, {pair, from({0})}}), "");
  EXPECT_NE(strict_order({{to({1}), to({2})}, {pair, from({0})}, {from({0}), pair}}), "");
  // The same two ranks in another group: other messages.
  LedgerEntry elsewhere = to({1});
  elsewhere.group = "elsewhere";
  EXPECT_NE(strict_order({{elsewhere}, {from({0})}, {}}), "");
}

TEST(StrictOrder, NamesNoMoreThanEightRanks) {
  std::string stuck = ring(20, [&](int, int right, int) -> std::vector<LedgerEntry> {
    return {exchange(everyone(20), {right}, {})};
  });
  EXPECT_NE(stuck.find("rank 7 at"), std::string::npos) << stuck;
  EXPECT_EQ(stuck.find("rank 8 at"), std::string::npos) << stuck;
  EXPECT_NE(stuck.find("and 12 more"), std::string::npos) << stuck;
}

// Orders that were made by playing them are never refused.
TEST(StrictOrder, AnyOrderThatOneThreadCouldPlayIsFine) {
  std::mt19937 draw(3);
  for (int run = 0; run < 50; ++run) {
    Ledgers ledgers(6);
    for (int k = 0; k < 200; ++k) {
      std::vector<int> members;
      while (members.size() < 2) {
        members.clear();
        for (int r = 0; r < 6; ++r)
          if (draw() % 2) members.push_back(r);
      }
      int a = members.front(), b = members.back();
      bool message = draw() % 2;
      for (int r : members) {
        if (!message) ledgers[size_t(r)].push_back(entry(AllReduce, members, text(members.size())));
        if (message && r == a) ledgers[size_t(r)].push_back(exchange(members, {b}, {b, b}));
        if (message && r == b) ledgers[size_t(r)].push_back(exchange(members, {a, a}, {a}));
      }
    }
    EXPECT_EQ(strict_order(ledgers), "");
  }
}

// 8 ranks, a payload of 1 GB in 10 ms: 100 GB/s for the caller.
TEST(Formulas, C15_BusBandwidth) {
  auto bus = [](Collective c, int n) { return bus_bandwidth(c, n, 1e9, 0.010) / 1e9; };
  EXPECT_DOUBLE_EQ(algorithm_bandwidth(1e9, 0.010), 100e9);
  EXPECT_DOUBLE_EQ(bus(AllReduce, 8), 175);
  EXPECT_DOUBLE_EQ(bus(AllGather, 8), 87.5);
  EXPECT_DOUBLE_EQ(bus(ReduceScatter, 8), 87.5);
  EXPECT_DOUBLE_EQ(bus(AllToAll, 8), 87.5);
  EXPECT_DOUBLE_EQ(bus(Broadcast, 8), 100);
  EXPECT_DOUBLE_EQ(bus(Reduce, 8), 100);
  EXPECT_DOUBLE_EQ(bus(AllReduce, 2), 100);
  EXPECT_DOUBLE_EQ(bus(AllReduce, 512), 100 * 2 * 511.0 / 512);
  // The bus carries what the ledger counts on the wire.
  for (Collective c : {AllReduce, AllGather, ReduceScatter, AllToAll, Broadcast, Reduce, Scatter})
    for (int n : {2, 4, 8})
      EXPECT_DOUBLE_EQ(bus_factor(c, n) * 4096, double(wire_bytes(c, 4096, n))) << name_of(c);
}

TEST(Formulas, C19_GptFourInGpuYears) {
  EXPECT_NEAR(gpu_years(25'000, 90), 6164, 0.5);  // "about 6000 years" on one A100
  EXPECT_NEAR(days_on(25'000, gpu_years(25'000, 90)), 90, 1e-9);
  EXPECT_NEAR(days_on(25'000, 6000), 87.6, 1e-9);
}

}  // namespace
}  // namespace lockstep
