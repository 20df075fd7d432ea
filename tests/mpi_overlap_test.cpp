// What is hidden behind computation, where messages really move beside it: over MPI, whose helper
// thread keeps them going. Runs under mpirun with 2 ranks. Whether the helper gets a processor at
// the right moment is up to the machine, so that what must happen at all may happen in any of
// several steps; what must never happen is looked for in all of them.

#include <gtest/gtest.h>

#include "common/overlap_meter.h"
#include "tests/mpi/main.h"
#include "tests/traced_layout.h"

namespace lockstep {
namespace {

using Kind = TraceEvent::Kind;
constexpr int kSteps = 8;

struct Seen {
  Recording recording;
  OverlapMeter::Sum data;  // of the data group, all that is as large as a bucket
};

// Gradients of 800 kB, in buckets of 100; a backward pass takes some milliseconds.
Seen run(const TracedRig::Make& make) {
  auto world = fresh_world();
  ProcessMesh mesh(*world, {.dp = world->size()});
  LayoutRig::Settings s;
  s.config.layers = 4;
  s.config.hidden = 64;
  s.config.head_dim = 16;
  s.config.ffn = 160;
  s.config.vocab = 256;
  s.parallel.bucket_bytes = 100'000;
  TracedRig rig(mesh, s, make);
  std::vector<MicroBatch> mine = {random_batch(4, 64, s.config.vocab, uint64_t(world->rank()))};
  rig.step(mine);
  Trace trace(Device::CPU, {.wait = 0, .warmup = 0, .active = kSteps}, world->rank());
  TraceScope scope(&trace);
  OverlapMeter meter(world->ledger(), Device::CPU);
  for (int step = 0; step < kSteps; ++step) {
    rig.step(mine);
    trace.step();
  }
  return {trace.recording(), meter.read().sum(mesh.data().name(), 10'000)};
}

int64_t ended_within(const std::vector<TraceEvent>& moving, const std::vector<TraceEvent>& parts) {
  int64_t count = 0;
  for (const TraceEvent& m : moving)
    for (const TraceEvent& p : parts) count += m.begin >= p.begin && m.end <= p.end;
  return count;
}

TEST(Overlap, D1_NaiveMovesNothingDuringBackward) {
  Seen seen = run(maker(Sync::Naive));
  auto backward = find(seen.recording, Kind::Host, "backward");
  ASSERT_EQ(backward.size(), size_t(kSteps));
  EXPECT_EQ(together(backward, find(seen.recording, Kind::Communication, "")), 0);
  EXPECT_GT(seen.data.operations, kSteps);
  EXPECT_GT(seen.data.exposed_share(), 0.9);
}

TEST(Overlap, D2_MessagesMoveDuringBackward) {
  for (Sync sync : {Sync::Overlapped, Sync::Bucketed}) {
    Seen seen = run(maker(sync));
    auto backward = find(seen.recording, Kind::Host, "backward");
    auto moving = find(seen.recording, Kind::Communication, "all_reduce");
    EXPECT_GT(together(backward, moving), 0) << name_of(sync);
    // Not only launched: over before backward is, without anybody waiting for them.
    EXPECT_GT(ended_within(moving, backward), 0) << name_of(sync);
    auto waits = find(seen.recording, Kind::Exposed, "wait all_reduce");
    EXPECT_EQ(together(backward, waits), 0) << name_of(sync);
    EXPECT_LT(seen.data.exposed_share(), 0.9) << name_of(sync);
  }
}

TEST(Overlap, S14_TheDiagnosisTellsTurnsFromOverlap) {
  Diagnosis naive = diagnose(run(maker(Sync::Naive)).recording.events);
  EXPECT_TRUE(naive.takes_turns()) << to_text(naive);
  EXPECT_GT(naive.lost[size_t(Gap::Cause::Communication)], 0);
  EXPECT_NE(to_text(naive).find("communication and computation take turns"), std::string::npos);
  Diagnosis bucketed = diagnose(run(maker(Sync::Bucketed)).recording.events);
  EXPECT_FALSE(bucketed.takes_turns()) << to_text(bucketed);
  EXPECT_GT(bucketed.hidden, 0);
}

// The gather of unit n + 1 begins before unit n computes, and is under way meanwhile.
TEST(Overlap, Z6_GathersAreUnderWayWhileTheNeighbourComputes) {
  const Recording r = run(maker(Sync::Zero3)).recording;
  constexpr size_t kUnits = 6, kGathers = 2 * kUnits - 1;
  auto gathers = find(r, Kind::Communication, "all_gather");
  ASSERT_EQ(gathers.size(), kSteps * kGathers);
  int64_t beside_forward = 0, beside_backward = 0;
  for (size_t n = 0; n < kUnits; ++n) {
    auto forward = find(r, Kind::Host, text("unit ", n));
    auto backward = find(r, Kind::Instant, text("backward of unit ", n));
    ASSERT_EQ(forward.size(), size_t(kSteps));
    ASSERT_EQ(backward.size(), size_t(kSteps));
    for (size_t step = 0; step < kSteps; ++step) {
      // In the order of launch: units 0 … U-1, then U-2 … 0.
      const TraceEvent* of_step = &gathers[step * kGathers];
      if (n + 1 < kUnits) {
        EXPECT_LT(of_step[n + 1].begin, forward[step].begin) << n;
        beside_forward += together({of_step[n + 1]}, {forward[step]});
      }
      if (n > 0) {
        const TraceEvent& before = of_step[kUnits + (kUnits - 2) - (n - 1)];
        EXPECT_LT(before.begin, backward[step].begin) << n;
        beside_backward += before.end > backward[step].begin;
      }
    }
  }
  EXPECT_GT(beside_forward, 0);
  EXPECT_GT(beside_backward, 0);
}

TEST(Overlap, Z7_WeightsOfZero1TravelBesideTheOptimizerOrTheNextForward) {
  Seen optimizer = run(zero1(Zero1::Gather::DuringOptimizer));
  auto gathers = find(optimizer.recording, Kind::Communication, "all_gather");
  EXPECT_GT(together(gathers, find(optimizer.recording, Kind::Host, "optimizer")), 0);
  EXPECT_EQ(together(gathers, find(optimizer.recording, Kind::Host, "forward")), 0);

  Seen forward = run(zero1(Zero1::Gather::DuringForward));
  gathers = find(forward.recording, Kind::Communication, "all_gather");
  EXPECT_GT(together(gathers, find(forward.recording, Kind::Host, "forward")), 0);
  EXPECT_EQ(together(gathers, find(forward.recording, Kind::Host, "optimizer")), 0);
}

}  // namespace
}  // namespace lockstep
