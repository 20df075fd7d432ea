// How long schedules idle: the simulator against closed forms, which both must agree to the last
// digit (all times are sums of binary fractions), and the sources' numbers. And the program.

#include <gtest/gtest.h>

#include <cstdio>

#include "06_pipeline_parallel/closed_forms.h"
#include "06_pipeline_parallel/draw_timeline.h"
#include "06_pipeline_parallel/search.h"
#include "tests/shell.h"

namespace lockstep {
namespace {

const std::vector<StepTimes> kTimes{{1, 1, 1}, {1, 1.25, 0.75}, {1, 0.75, 1.5}, {2, 1, 1}};

Timeline run(const PlacedSchedule& pipeline, StepTimes t, double message = 0) {
  int v = pipeline.placement.chunks;
  return simulate(
      pipeline.schedule, pipeline.placement,
      equal_times(pipeline.placement.stages(), t.forward / v, t.input / v, t.weight / v, message));
}
Idle idle_of(const std::string& name, int p, int v, int m, StepTimes t = {}) {
  return idle(run(make_schedule(name, p, v, m), t));
}
double own_span(const Idle& shares, int rank) {  // idle time on it
  return shares.busy[rank] / (1 - shares.on_span[rank]) - shares.busy[rank];
}

TEST(PipelineSimulate, IdleTimeEqualsTheClosedFormWhereThereIsOne) {
  int compared = 0;
  for (const std::string& name : schedule_names())
    for (int p : {1, 2, 4, 8})
      for (int v : name == "interleaved" ? std::vector<int>{1, 2, 4} : std::vector<int>{0})
        for (int m : {1, 2, 3, 4, 7, 8, 15, 16, 32})
          for (StepTimes t : kTimes) {
            if (name == "dualpipe-v" && m < 2 * p) continue;
            if (name == "interleaved" && v > 1 && m % p != 0) continue;
            SCOPED_TRACE(text(name, " p ", p, " v ", v, " m ", m, " W ", t.weight));
            PlacedSchedule pipeline = make_schedule(name, p, v, m);
            Idle shares = idle(run(pipeline, t));
            auto clock = idle_on_clock(name, p, pipeline.placement.chunks, m, t);
            for (int rank = 0; rank < p; ++rank) {
              EXPECT_DOUBLE_EQ(shares.busy[rank], m * t.all());
              if (clock) {
                EXPECT_EQ(shares.step - shares.busy[rank], *clock);
              }
              auto span = idle_on_span(name, p, m, rank, t);
              if (span) {
                EXPECT_NEAR(own_span(shares, rank), *span, 1e-9);
              }
              compared += clock.has_value() + span.has_value();
            }
          }
  EXPECT_GT(compared, 3000);
}

// What stands beside each formula as its condition is one: without it the simulator disagrees.
TEST(PipelineSimulate, OutsideTheirConditionsClosedFormsDoNotHold) {
  EXPECT_FALSE(idle_on_clock("zb-h1", 4, 1, 3, {}).has_value());
  Idle few = idle_of("zb-h1", 4, 0, 3);
  EXPECT_GT(few.step - few.busy[0], 3.);  // (p - 1)(F + I - W)
  EXPECT_FALSE(idle_on_span("zb-h2", 4, 6, 0, {}).has_value());
  EXPECT_GT(idle_of("zb-h2", 4, 0, 6).on_span[0], 0.01);
  EXPECT_GT(idle_of("zb-v", 4, 0, 6).on_span[0], 0.01);
  StepTimes short_weights{1, 1, 0.5};
  EXPECT_FALSE(idle_on_span("zb-h2", 4, 16, 0, short_weights).has_value());
  EXPECT_GT(idle_of("zb-h2", 4, 0, 16, short_weights).on_span[0], 0.01);
  EXPECT_FALSE(idle_on_clock("dualpipe-v", 4, 2, 16, short_weights).has_value());
}

TEST(PipelineSimulate, P1_SevenOfEightWait) {
  EXPECT_EQ(naive_bubble(8), 7);  // p - 1 times what is computed
  Idle one = idle_of("afab", 8, 0, 1);
  EXPECT_DOUBLE_EQ(one.of_ideal, 7);
  for (int rank = 0; rank < 8; ++rank) EXPECT_DOUBLE_EQ(one.on_clock[rank], 7. / 8);
  // At any moment seven wait.
  Timeline timeline = run(make_schedule("afab", 8, 0, 1), {});
  for (double now = 0.25; now < 24; now += 0.5) {
    int at_work = 0;
    for (const auto& spans : timeline)
      for (const ActionSpan& s : spans) at_work += s.begin < now && now < s.end;
    EXPECT_EQ(at_work, 1) << now;
  }
}

TEST(PipelineSimulate, P3_EightMicroBatches) {
  Idle shares = idle_of("afab", 4, 0, 8);
  EXPECT_DOUBLE_EQ(shares.of_ideal, 3. / 8);
  EXPECT_DOUBLE_EQ(bubble_of_ideal(4, 8), 3. / 8);
}

TEST(PipelineSimulate, P4_SameBubbleAsAllForward) {
  for (int p : {2, 4, 8})
    for (int m : {1, 2, 3, 4, 8, 16})
      for (StepTimes t : kTimes)
        EXPECT_EQ(idle_of("1f1b", p, 0, m, t).step, idle_of("afab", p, 0, m, t).step);
}

TEST(PipelineSimulate, P6_ChunksDivideTheBubble) {
  for (int v : {1, 2, 4, 8})
    EXPECT_DOUBLE_EQ(idle_of("interleaved", 4, v, 16).of_ideal, bubble_of_ideal(4, 16, v));
  // Messages are v times as many, and have to be paid for where they do not hide.
  double thick = idle(run(make_schedule("interleaved", 4, 1, 4), {}, 0.25)).step;
  double thin = idle(run(make_schedule("interleaved", 4, 8, 4), {}, 0.25)).step;
  EXPECT_LT(idle_of("interleaved", 4, 8, 4).step, idle_of("interleaved", 4, 1, 4).step);
  EXPECT_GT(thin, thick);
}

TEST(PipelineSimulate, P7_BreadthFirstGivesMessagesMoreTime) {
  auto step = [](int group, double message) {
    return idle(run(make_schedule("interleaved", 4, 2, 16, group), {}, message)).step;
  };
  EXPECT_EQ(step(4, 0), step(16, 0));  // free messages: the dial changes memory alone
  EXPECT_EQ(step(4, 0), step(8, 0));
  EXPECT_LT(step(16, 0.25), step(4, 0.25));
}

TEST(PipelineSimulate, P8_BubbleGoesToZero) {
  double b1 = idle_of("1f1b", 4, 0, 8).step, h1 = idle_of("zb-h1", 4, 0, 8).step;
  EXPECT_EQ(b1 - 24, 3 * (h1 - 24));  // a third of the idle time, with equal F, I and W
  for (int p : {2, 4, 8})
    for (const char* name : {"zb-h2", "zb-v"}) {
      Idle shares = idle_of(name, p, 0, 2 * p - 1);
      for (int rank = 0; rank < p; ++rank) EXPECT_EQ(shares.on_span[rank], 0) << name << p;
    }
  // On the clock H2 is no better than H1, which holds half as much.
  EXPECT_EQ(idle_of("zb-h2", 4, 0, 8).step, h1);
}

TEST(PipelineSimulate, P9_DualPipeIdlesLess) {
  for (int p : {2, 4, 8}) {
    double own = idle_of("dualpipe-v", p, 0, 16).of_ideal;
    EXPECT_LT(own, idle_of("1f1b", p, 0, 16).of_ideal / 5);
    EXPECT_LT(own, idle_of("interleaved", p, 2, 16).of_ideal / 2);
  }
}

TEST(PipelineSimulate, P10_SearchIsNeverWorseAndKeepsToItsMemory) {
  for (Placement placement : {Placement{Placement::Loop, 4, 1}, Placement{Placement::Loop, 4, 2},
                              Placement{Placement::V, 4, 2}})
    for (int m : {1, 4, 8})
      for (double limit : {1.0, 4.0, 8.0}) {
        Times times = equal_times(placement.stages(), 1, 1.25, 0.75, 0.125);
        times.forward.back() = times.input.back() = times.weight.back() = 1.5;  // the head
        Found found = search(placement, m, times, limit);
        EXPECT_NO_THROW(validate(found.schedule, placement, m));
        EXPECT_EQ(found.peak, peak_activations(found.schedule, placement.chunks));
        EXPECT_LE(found.peak, limit);
        EXPECT_EQ(found.step, idle(simulate(found.schedule, placement, times)).step);
        for (const auto& [name, schedule] : named_schedules(placement, m)) {
          if (peak_activations(schedule, placement.chunks) > limit) continue;
          EXPECT_LE(found.step, idle(simulate(schedule, placement, times)).step) << name;
        }
      }
  // Where it finds something: few micro-batches, two chunks.
  Placement v_shape{Placement::V, 8, 2};
  Times equal = equal_times(16, 0.5, 0.5, 0.5);
  double known = idle(simulate(zb_v(8, 8), v_shape, equal)).step;
  EXPECT_LT(search(v_shape, 8, equal, 8).step, 0.9 * known);
  EXPECT_THROW(search(v_shape, 8, equal, 0.5), Error);
}

TEST(PipelineSimulate, P11_PrintedNumbers) {
  EXPECT_NEAR(bubble_of_ideal(8, 64), 0.11, 0.005);
  EXPECT_EQ(bubble_of_ideal(4, 4), 0.75);
  EXPECT_NEAR(bubble_of_clock(4, 4), 0.429, 5e-4);
  EXPECT_DOUBLE_EQ(idle_of("1f1b", 8, 0, 64).of_ideal, bubble_of_ideal(8, 64));
  Idle four = idle_of("1f1b", 4, 0, 4);
  EXPECT_DOUBLE_EQ(four.of_ideal, 0.75);
  EXPECT_DOUBLE_EQ(four.of_clock, 3. / 7);
}

TEST(PipelineSimulate, P13_BackwardTakesTwiceOrWhatYouSay) {
  Times twice = equal_times(2, 1, 1, 1), other = equal_times(2, 1, 0.5, 2);
  Action b{Action::B, 0, 0}, i{Action::I, 0, 0}, w{Action::W, 0, 0};
  EXPECT_EQ(duration(b, 0, twice), 2);
  EXPECT_EQ(duration(b, 0, other), 2.5);
  EXPECT_EQ(duration(i, 0, other) + duration(w, 0, other), 2.5);
  // The share of 1F1B does not depend on it, the time does.
  EXPECT_DOUBLE_EQ(idle_of("1f1b", 4, 0, 8, {1, 1, 1}).of_clock,
                   idle_of("1f1b", 4, 0, 8, {1, 0.5, 2}).of_clock);
  EXPECT_EQ(idle_of("1f1b", 4, 0, 8, {1, 0.5, 2}).step, 11 * 3.5);
}

TEST(PipelineSimulate, P14_MessagesHideBehindALayer) {
  Hardware h100{989e12, 50e9};
  // 2 bytes x flops / (32 h layers bandwidth)
  EXPECT_NEAR(message_overlap(4096, 8, 2, h100), 2 * 989e12 / (32. * 4096 * 8 * 50e9), 1e-12);
  EXPECT_DOUBLE_EQ(message_overlap(4096, 8, 2, h100), 2 * message_overlap(4096, 16, 2, h100));
  EXPECT_DOUBLE_EQ(message_overlap(4096, 8, 2, h100), 2 * message_overlap(8192, 8, 2, h100));
  // As two times: b s h elements against 2 x 16 h² operations per token and layer.
  double tokens = 8192, h = 4096, layers = 8;
  double sending = tokens * h * 2 / 50e9, computing = 2 * 16 * h * h * layers * tokens / 989e12;
  EXPECT_NEAR(message_overlap(h, layers, 2, h100), sending / computing, 1e-12);
  EXPECT_LT(message_overlap(h, layers, 2, h100), 0.05);
  EXPECT_EQ(message_volume(8, 2048, 512), 2 * 8 * 2048 * 512);
}

// B is the gradients of inputs alone in these numbers, and takes 1 like F and W.
TEST(PipelineSimulate, Pitfall79_WhatTheBubbleIsAShareOf) {
  for (const char* name : {"afab", "1f1b"}) {
    Idle shares = idle_of(name, 4, 0, 8);
    EXPECT_DOUBLE_EQ(shares.of_clock, 3. / 11) << name;
    EXPECT_EQ(shares.step - shares.busy[0], 9) << name;
  }
  EXPECT_NEAR(3. / 11, 0.2727, 5e-5);
  EXPECT_EQ(bubble_of_clock(4, 8), 3. / 11);
  EXPECT_DOUBLE_EQ(idle_of("interleaved", 4, 2, 8).of_clock, 3. / 19);
  EXPECT_EQ(bubble_of_clock(4, 8, 2), 3. / 19);
  Idle h1 = idle_of("zb-h1", 4, 0, 8);
  EXPECT_EQ(h1.step - h1.busy[0], 3);
  EXPECT_EQ(idle_on_clock("zb-h1", 4, 1, 8, {}), 3);
  EXPECT_EQ(idle_on_clock("1f1b", 4, 1, 8, {}), 9);
}

TEST(PipelineSimulate, MessagesAndUnequalStagesByHand) {
  // Stage 1 takes twice as long, a message 0.5.
  Times times{{1, 2}, {1, 2}, {1, 2}, 0.5};
  Timeline timeline = simulate(one_f_one_b(2, 2), {Placement::Loop, 2, 1}, times);
  auto expect = [&](int rank, size_t i, double begin, double end) {
    EXPECT_EQ(timeline[rank][i].begin, begin) << rank << i;
    EXPECT_EQ(timeline[rank][i].end, end) << rank << i;
  };
  expect(0, 0, 0, 1), expect(0, 1, 1, 2);           // F0 F1
  expect(1, 0, 1.5, 3.5), expect(1, 1, 3.5, 7.5);   // F0 B0
  expect(1, 2, 7.5, 9.5), expect(1, 3, 9.5, 13.5);  // F1 B1
  expect(0, 2, 8, 10), expect(0, 3, 14, 16);        // B0 B1
  Idle shares = idle(timeline);
  EXPECT_EQ(shares.step, 16);
  EXPECT_EQ(shares.busy, (std::vector<double>{6, 12}));
  EXPECT_EQ(shares.on_span[1], 0);
  EXPECT_EQ(shares.on_clock[1], 0.25);
  EXPECT_DOUBLE_EQ(shares.of_clock, 14. / 32);
  EXPECT_DOUBLE_EQ(shares.of_ideal, 14. / 18);
}

TEST(PipelineSimulate, TextAndTableOfATimeline) {
  Timeline timeline = run(make_schedule("1f1b", 2, 0, 2), {});
  EXPECT_EQ(as_text(timeline),
            "rank 0    F0 F1 ......B0    ...B1    \n"
            "rank 1    ...F0 B0    F1 B1    ......\n");
  for (int m : {1, 16, 200}) {  // never wider than 100 columns
    std::istringstream lines(as_text(run(make_schedule("zb-v", 4, 0, m), {})));
    for (std::string line; std::getline(lines, line);) EXPECT_LE(line.size(), 100u);
  }
  Timeline again = from_csv(as_csv(timeline));
  EXPECT_EQ(as_csv(again), as_csv(timeline));
  EXPECT_EQ(idle(again).on_clock, idle(timeline).on_clock);
  std::string head = "rank,action,chunk,micro_batch,begin,end\n";
  expect_refusal([&] { from_csv("a,b\n"); }, {"begins with the line rank,action"});
  expect_refusal([&] { from_csv(head + "0,X,0,0,1,2\n"); }, {"0,X,0,0,1,2"});
  expect_refusal([&] { from_csv(head + "0,F,0,0,2,1\n"); }, {"0,F,0,0,2,1"});
  expect_refusal([&] { from_csv(head + "0,F,0,0,1\n"); }, {"0,F,0,0,1"});
  expect_refusal([&] { from_csv(head + "0,F,0,0,0,2\n0,F,0,1,1,3\n"); }, {"0,F,0,1,1,3"});
  EXPECT_THROW(idle(from_csv(head + "1,F,0,0,0,2\n")), Error);  // rank 0 does nothing
}

Output timeline(const std::string& flags) {
  return shell(LOCKSTEP_BINARY_DIR "/06_pipeline_parallel/timeline " + flags);
}

TEST(PipelineSimulate, ProgramShowsWhatItSimulates) {
  Output out = timeline("");
  EXPECT_EQ(out.status, 0) << out.out;
  EXPECT_TRUE(out.says("64 actions and 48 messages in 22 rounds")) << out.out;
  EXPECT_TRUE(out.says("step 33: idle 27.3 % of the clock, 37.5 % of what all ranks compute"));
  EXPECT_TRUE(out.says("closed form      idle 9 on the clock; 9 on the span of rank 0")) << out.out;
  Output found = timeline("--forward 1,1,1,1.4 --search");
  EXPECT_TRUE(found.says("candidates with at most 4 activations: ")) << found.out;
  EXPECT_FALSE(found.says("closed form")) << found.out;  // there is none

  TemporaryFolder dir;
  std::string csv = dir / "m.csv", svg = dir / "m.svg";
  EXPECT_EQ(timeline("--schedule zb-h1 --csv " + csv).status, 0);
  Output both = timeline("--schedule zb-h1 --input 1.5 --measured " + csv + " --svg " + svg);
  EXPECT_TRUE(both.says("planned") && both.says("measured")) << both.out;
  EXPECT_NE(content_of(svg).find("measured</text>"), std::string::npos);
}

TEST(PipelineSimulate, ProgramRefusesInOneSentence) {
  for (auto [flags, part] : std::vector<std::pair<std::string, std::string>>{
           {"--schedule interleaved --micro-batches 6", "on 4 ranks cannot take 6 micro-batches"},
           {"--schedule gpipe", "'gpipe' is not afab, 1f1b"},
           {"--schedule dualpipe-v --micro-batches 7", "needs at least 8 micro-batches, not 7"},
           {"--chunks 2", "1 chunk on each rank, not 2"},
           {"--forward 1,2", "--forward takes one time, or one for each of 4 stages, not 2"},
           {"--weight -1", "--weight takes times above 0 and below 1e9, not -1"},
           {"--pp 0", "--pp: '0' is not a whole number from 1"},
           {"--search --memory 0.5", "no room for one micro-batch"},
           {"--measured /nowhere.csv", "--measured /nowhere.csv cannot be read"},
           {"--csv /nowhere/x", "--csv: '/nowhere/x' is not a file that can be written"}}) {
    Output out = timeline(flags);
    EXPECT_NE(out.status, 0) << flags;
    EXPECT_TRUE(out.says(part)) << out.out;
  }
}

}  // namespace
}  // namespace lockstep
