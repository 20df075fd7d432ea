// Schedules as data: which are valid, in which order they act, what they hold, send and refuse.
// Nothing runs here.

#include <gtest/gtest.h>

#include "06_pipeline_parallel/schedules.h"
#include "06_pipeline_parallel/validate.h"
#include "tests/temporary.h"

namespace lockstep {
namespace {

const std::vector<int> kMicroBatches{1, 2, 3, 4, 8, 16};

bool allowed(const std::string& name, int p, int m) {
  if (name == "dualpipe-v") return m >= 2 * p;
  return name != "interleaved" || m % p == 0;
}

// Calls see(pipeline, p, m) for all that there are.
template <class See>
void for_each_schedule(See see) {
  for (const std::string& name : schedule_names())
    for (int p : {1, 2, 3, 4, 8})
      for (int m : kMicroBatches) {
        if (!allowed(name, p, m)) continue;
        SCOPED_TRACE(text(name, " on ", p, " ranks, ", m, " micro-batches"));
        see(make_schedule(name, p, 0, m), p, m);
      }
}

// "F0 f0 B0 …": small letters for odd chunks.
std::string letters(const std::vector<Action>& actions) {
  std::string out;
  for (const Action& a : actions)
    out += text(out.empty() ? "" : " ", (a.chunk % 2 ? "fbiw" : "FBIW")[a.kind], a.micro);
  return out;
}

double busiest(const PlacedSchedule& pipeline) {
  double peak = 0;
  for (const auto& actions : pipeline.schedule)
    peak = std::max(peak, peak_activations(actions, pipeline.placement.chunks));
  return peak;
}

int messages_in(const Plan& rounds) {
  int n = 0;
  for (const auto& rank : rounds)
    for (const Round& round : rank)
      for (const Message& m : round.messages) n += m.sends;
  return n;
}

TEST(PipelineSchedule, EveryScheduleIsValidOrRefusedWithItsRule) {
  for_each_schedule([](const PlacedSchedule& pipeline, int, int m) {
    EXPECT_NO_THROW(validate(pipeline.schedule, pipeline.placement, m));
  });
  for (int p : {2, 4, 8})
    for (int m : kMicroBatches) {
      if (m < 2 * p)
        expect_refusal([&] { make_schedule("dualpipe-v", p, 0, m); },
                       {text("on ", p, " ranks needs at least ", 2 * p), text("not ", m)});
      if (m % p != 0)
        expect_refusal([&] { make_schedule("interleaved", p, 0, m); },
                       {text("on ", p, " ranks"), text(m, " micro-batches in groups of ", p)});
    }
}

TEST(PipelineSchedule, WrongNamesAndChunksAreRefused) {
  expect_refusal([] { make_schedule("gpipe", 2, 0, 4); }, {"gpipe", "afab, 1f1b, interleaved"});
  expect_refusal([] { make_schedule("1f1b", 2, 2, 4); }, {"1f1b has 1 chunk on each rank, not 2"});
  expect_refusal([] { make_schedule("zb-v", 2, 1, 4); }, {"zb-v has 2 chunks", "not 1"});
  expect_refusal([] { make_schedule("1f1b", 2, 1, 4, 4); }, {"--group", "not for 1f1b"});
  expect_refusal([] { make_schedule("interleaved", 4, 2, 16, 6); }, {"16", "groups of 6"});
  expect_refusal([] { make_schedule("interleaved", 4, 2, 16, 2); }, {"groups of 2", "at least"});
  expect_refusal([] { make_schedule("afab", 2, 1, 0); }, {"2 and 0"});
}

TEST(PipelineSchedule, P3_AllForwardHoldsAllMicroBatches) {
  EXPECT_EQ(letters(afab(2, 3)[1]), "F0 F1 F2 B0 B1 B2");
  for (int m : kMicroBatches) EXPECT_EQ(busiest(make_schedule("afab", 4, 0, m)), m);
}

TEST(PipelineSchedule, P4_OneForwardOneBackwardHoldsNoMoreThanRanks) {
  EXPECT_EQ(letters(one_f_one_b(2, 3)[0]), "F0 F1 B0 F2 B1 B2");
  for (int p : {2, 4, 8})
    for (int m : kMicroBatches)
      for (int rank = 0; rank < p; ++rank)
        EXPECT_EQ(peak_activations(one_f_one_b(p, m)[rank], 1), std::min(m, p - rank));
}

TEST(PipelineSchedule, PeakActivationsOfAllSchedulesAreFlatInMicroBatches) {
  for (int p : {2, 4, 8})
    for (int m : {2 * p, 4 * p, 8 * p}) {
      EXPECT_EQ(busiest(make_schedule("interleaved", p, 2, m)), p + (p - 1) / 2.);
      EXPECT_EQ(busiest(make_schedule("interleaved", p, 4, m)), p + (p - 1) / 4.);
      EXPECT_EQ(busiest(make_schedule("zb-h1", p, 0, m)), p);
      EXPECT_EQ(busiest(make_schedule("zb-h2", p, 0, m)), 2 * p - 1);
      EXPECT_EQ(busiest(make_schedule("zb-v", p, 0, m)), p);
      EXPECT_EQ(busiest(make_schedule("dualpipe-v", p, 0, m)), p + 0.5);
    }
}

TEST(PipelineSchedule, P6_InterleavingMultipliesMessages) {
  for (int p : {2, 4, 8})
    for (int v : {1, 2, 3}) {
      PlacedSchedule pipeline = make_schedule("interleaved", p, v, 2 * p);
      EXPECT_EQ(messages_in(plan(pipeline.schedule, pipeline.placement)), 2 * 2 * p * (p * v - 1));
    }
  // Odd and even layers: with two ranks and as many chunks as layers each, rank 0 has 0, 2, 4, …
  Placement odd_and_even{Placement::Loop, 2, 4};
  for (int layer = 0; layer < 8; ++layer) EXPECT_EQ(odd_and_even.rank_of(layer), layer % 2);
}

TEST(PipelineSchedule, FoldOfAVCostsNoMessage) {
  for (const char* name : {"zb-v", "dualpipe-v"})
    for (int p : {1, 2, 4}) {
      PlacedSchedule pipeline = make_schedule(name, p, 0, 8);
      EXPECT_EQ(messages_in(plan(pipeline.schedule, pipeline.placement)), 2 * 8 * (2 * p - 2));
      EXPECT_TRUE(pipeline.placement.ends_share_a_rank());
    }
}

TEST(PipelineSchedule, P7_DepthFirstBreadthFirstAndBetween) {
  auto first_forwards = [](int group) {
    std::vector<Action> actions = interleaved(2, 2, 8, group)[0];
    std::erase_if(actions, [](const Action& a) { return a.kind != Action::F; });
    return letters(actions);
  };
  EXPECT_EQ(first_forwards(2), "F0 F1 f0 f1 F2 F3 f2 f3 F4 F5 f4 f5 F6 F7 f6 f7");
  EXPECT_EQ(first_forwards(4), "F0 F1 F2 F3 f0 f1 f2 f3 F4 F5 F6 F7 f4 f5 f6 f7");
  EXPECT_EQ(first_forwards(8), "F0 F1 F2 F3 F4 F5 F6 F7 f0 f1 f2 f3 f4 f5 f6 f7");
  double before = 0;
  for (int group : {4, 8, 16}) {  // the dial costs memory
    PlacedSchedule pipeline = make_schedule("interleaved", 4, 2, 16, group);
    EXPECT_NO_THROW(validate(pipeline.schedule, pipeline.placement, 16));
    EXPECT_GT(busiest(pipeline), before);
    before = busiest(pipeline);
  }
}

TEST(PipelineSchedule, P8_WeightsComeAnyTimeAfterTheirInputs) {
  EXPECT_EQ(letters(zero_bubble_h1(4, 4)[0]), "F0 F1 F2 F3 I0 W0 I1 W1 I2 W2 I3 W3");
  EXPECT_EQ(letters(zero_bubble_h1(4, 4)[3]), "F0 I0 F1 I1 F2 I2 F3 I3 W0 W1 W2 W3");
  Schedule late = zero_bubble_h1(4, 4);  // all of them at the end: as valid
  for (auto& actions : late)
    std::stable_partition(actions.begin(), actions.end(),
                          [](const Action& a) { return a.kind != Action::W; });
  EXPECT_NO_THROW(validate(late, {Placement::Loop, 4, 1}, 4));
  std::swap(late[2][1], late[2].back());  // but not before
  EXPECT_THROW(validate(late, {Placement::Loop, 4, 1}, 4), Error);
}

TEST(PipelineSchedule, P9_TwoStreamsCrossOnEveryRank) {
  Schedule schedule = dualpipe_v(2, 4);
  EXPECT_EQ(letters(schedule[0]), "F0 F1 F2 f0 i0 w0 f1 F3 b1 f2 B0 b2 f3 B1 b3 I2 W2 I3 W3");
  EXPECT_EQ(letters(schedule[1]), "F0 f0 F1 f1 F2 b0 f2 B0 F3 b1 f3 B1 b2 B2 i3 I3 w3 W3");
  // In the middle every forward of one stream stands beside a backward of the other.
  for (int rank = 0; rank < 4; ++rank) {
    int pairs = 0;
    const auto actions = dualpipe_v(4, 16)[rank];
    for (size_t i = 1; i < actions.size(); ++i)
      pairs += actions[i - 1].kind == Action::F && actions[i].kind == Action::B &&
               actions[i - 1].chunk != actions[i].chunk;
    EXPECT_EQ(pairs, 2 * (16 - 8 + rank + 1) + (4 - rank - 1)) << rank;
  }
}

TEST(PipelineSchedule, Pitfall68_FewerMicroBatchesThanStages) {
  for (int m : {1, 2, 3}) {
    Schedule schedule = one_f_one_b(4, m);
    EXPECT_NO_THROW(validate(schedule, {Placement::Loop, 4, 1}, m));
    for (int rank = 0; rank < 4; ++rank) {
      int forwards = 0;
      while (schedule[rank][forwards].kind == Action::F) ++forwards;
      EXPECT_EQ(forwards, std::min(m, 4 - rank)) << m << rank;  // warm-up and the first of a pair
    }
  }
  EXPECT_EQ(letters(one_f_one_b(4, 1)[0]), "F0 B0");
  EXPECT_EQ(letters(one_f_one_b(4, 3)[2]), "F0 F1 B0 F2 B1 B2");
}

TEST(PipelineSchedule, Pitfall69_InterleavedWarmUp) {
  auto warm_ups = [](int m) {
    std::vector<int> out;
    for (const auto& actions : interleaved(4, 2, m, 4)) {
      int forwards = 0;
      while (actions[forwards].kind == Action::F) ++forwards;
      out.push_back(std::min(forwards, 2 * m) - (forwards < 2 * m));
    }
    return out;
  };
  EXPECT_EQ(warm_ups(8), (std::vector<int>{10, 8, 6, 4}));
  EXPECT_EQ(warm_ups(4), (std::vector<int>{8, 8, 6, 4}));
  expect_refusal([] { make_schedule("interleaved", 4, 2, 6); }, {"4 ranks", "6 micro-batches"});
  for (int m : {1, 3, 6, 8})
    EXPECT_EQ(make_schedule("interleaved", 4, 1, m).schedule, one_f_one_b(4, m));
}

TEST(PipelineSchedule, MessagesOfARoundMatch) {
  for_each_schedule([](const PlacedSchedule& pipeline, int p, int) {
    Plan rounds = plan(pipeline.schedule, pipeline.placement);
    for (size_t k = 0; k < rounds[0].size(); ++k)
      for (int a = 0; a < p; ++a)
        for (int b = 0; b < p; ++b) {
          auto between = [&](int rank, int peer, bool sends) {
            std::vector<Product> out;
            for (const Message& m : rounds[rank][k].messages)
              if (m.peer == peer && m.sends == sends) out.push_back({m.gradient, m.stage, m.micro});
            return out;
          };
          EXPECT_EQ(between(a, b, true), between(b, a, false));
        }
  });
}

TEST(PipelineSchedule, MessagesNameTheChunkOfEitherSide) {
  // Two ranks, two chunks in a loop: stage 1 (rank 1, chunk 0) feeds stage 2 (rank 0, chunk 1).
  Plan rounds =
      plan({{{Action::F, 0, 0}, {Action::F, 1, 0}}, {{Action::F, 0, 0}}}, {Placement::Loop, 2, 2});
  ASSERT_EQ(rounds[0].size(), 3u);
  EXPECT_EQ(rounds[1][1].messages, (std::vector<Message>{{true, 0, false, 1, 0, 0}}));
  EXPECT_EQ(rounds[0][1].messages, (std::vector<Message>{{false, 1, false, 1, 1, 0}}));
  EXPECT_FALSE(rounds[0][1].action.has_value());
}

// All messages of all ranks have one order: the round, and in it the sender. So they need not be
// grouped, if each rank keeps that order.
TEST(PipelineSchedule, MessagesMayAlsoGoOneAtATime) {
  for_each_schedule([](const PlacedSchedule& pipeline, int, int) {
    std::vector<std::vector<LedgerEntry>> single;
    for (const auto& ledger : ledgers_of(plan(pipeline.schedule, pipeline.placement))) {
      EXPECT_FALSE(pipeline.placement.ranks > 1 && ledger.empty());
      single.emplace_back();
    }
    Plan rounds = plan(pipeline.schedule, pipeline.placement);
    for (size_t rank = 0; rank < rounds.size(); ++rank)
      for (const Round& round : rounds[rank])
        for (const Message& m : round.messages) {
          LedgerEntry entry;
          entry.operation = Collective::Exchange, entry.group = "pp";
          (m.sends ? entry.sends : entry.receives) = {m.peer};
          single[rank].push_back(entry);
        }
    EXPECT_EQ(strict_order(single), "");
  });
}

TEST(PipelineSchedule, MessagesThatDoNotMeetAreFound) {
  // Where a rank both sends and receives in a round: two operations instead of one group. If both
  // ranks send first, they wait for each other.
  auto split = [](Plan& rounds, int rank, bool sends_first) {
    for (size_t k = 0; k < rounds[rank].size(); ++k) {
      std::vector<Message>& messages = rounds[rank][k].messages;
      if (messages.size() < 2) continue;
      std::vector<Message> second{messages[messages[0].sends == sends_first ? 1 : 0]};
      messages.erase(std::find(messages.begin(), messages.end(), second[0]));
      rounds[rank].insert(rounds[rank].begin() + long(++k), Round{{}, second});
    }
  };
  PlacedSchedule pipeline = make_schedule("zb-v", 2, 0, 8);
  const Plan good = plan(pipeline.schedule, pipeline.placement);
  Plan bad = good;
  split(bad, 0, true), split(bad, 1, true);
  expect_refusal([&] { check_messages(bad); }, {"2 of 2 ranks are stuck", "sending to"});
  bad = good;
  split(bad, 0, true), split(bad, 1, false);
  EXPECT_NO_THROW(check_messages(bad));
  for (size_t k = 0; k < good[1].size(); ++k) {
    bad = good;
    if (good[1][k].messages.empty()) continue;
    bad[1][k].messages.clear();
    EXPECT_THROW(check_messages(bad), Error) << k;
  }
}

TEST(PipelineSchedule, LostDoubledAndChangedActionsAreFound) {
  for (const std::string& name : schedule_names()) {
    const PlacedSchedule good = make_schedule(name, 2, 0, 4);
    for (int rank = 0; rank < 2; ++rank)
      for (size_t i = 0; i < good.schedule[rank].size(); ++i) {
        SCOPED_TRACE(text(name, ", rank ", rank, ", action ", i));
        auto rejected = [&](auto change) {
          Schedule bad = good.schedule;
          change(bad[rank]);
          EXPECT_THROW(validate(bad, good.placement, 4), Error);
        };
        rejected([&](auto& actions) { actions.erase(actions.begin() + long(i)); });
        rejected([&](auto& actions) { actions.insert(actions.begin() + long(i), actions[i]); });
        rejected([&](auto& actions) { actions[i].micro = (actions[i].micro + 1) % 4; });
        rejected([&](auto& actions) { actions[i].micro = -1; });
        rejected([&](auto& actions) { actions[i].chunk = 2; });
        rejected([&](auto& actions) { actions[i].kind = Action::Kind((actions[i].kind + 1) % 4); });
      }
  }
}

TEST(PipelineSchedule, WrongOrdersAreFoundAndNamed) {
  Placement two{Placement::Loop, 2, 1};
  using A = Action;
  Schedule good{{{A::F, 0, 0}, {A::F, 0, 1}, {A::B, 0, 0}, {A::B, 0, 1}},
                {{A::F, 0, 0}, {A::B, 0, 0}, {A::F, 0, 1}, {A::B, 0, 1}}};
  EXPECT_NO_THROW(validate(good, two, 2));
  Schedule bad = good;
  std::swap(bad[1][0], bad[1][1]);
  expect_refusal(
      [&] { validate(bad, two, 2); },
      {"hangs", "rank 1 at B of chunk 0, micro-batch 0 waits for the activation of stage 1"});
  bad = good;
  std::swap(bad[0][2], bad[0][3]);  // gradients in another order: other bits
  expect_refusal([&] { validate(bad, two, 2); },
                 {"rank 0", "micro-batch 1 comes where I or B of micro-batch 0 should"});
  bad = good;  // each waits for the other one
  std::swap(bad[0][1], bad[0][2]);
  std::swap(bad[1][1], bad[1][2]);
  expect_refusal(
      [&] { validate(bad, two, 2); },
      {"rank 0 at B of chunk 0, micro-batch 0 waits for the gradient of stage 1 on rank 1",
       "rank 1 at F of chunk 0, micro-batch 1 waits for the activation of stage 0"});
  expect_refusal([&] { validate(good, two, 3); }, {"2 F, 2 I and 2 W", "3 micro-batches"});
  expect_refusal([&] { validate(good, two, 1); }, {"2 F, 2 I and 2 W", "1 micro-batches"});
  expect_refusal([&] { validate(good, {Placement::Loop, 4, 1}, 2); }, {"2 ranks cannot run on 4"});
  good[1].insert(good[1].begin() + 3, {Action::F, 0, 1});
  expect_refusal([&] { validate(good, two, 2); }, {"F of micro-batch 2 would be one too many"});
}

}  // namespace
}  // namespace lockstep
