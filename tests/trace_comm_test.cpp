// Communication in traces: its spans, its lanes, what a diagnosis makes of it; and what the traces
// of data parallelism and ZeRO show. Ranks are threads, which move messages in wait() only, so that
// here it is the launches that show what could overlap; mpi_overlap_test has messages that move.

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "tests/slow_communicator.h"
#include "tests/temporary.h"
#include "tests/traced_layout.h"

namespace lockstep {
namespace {

using Kind = TraceEvent::Kind;
using Lane = TraceEvent::Lane;
using Pass = DataParallel::Pass;
constexpr TraceSchedule kOneStep{.wait = 0, .warmup = 0, .active = 1};
constexpr int64_t kMs = 1'000'000;

void compute(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

// ---- Spans ----

TEST(TraceComm, S13_OperationsHaveALaneOfTheirOwn) {
  TemporaryFolder dir;
  auto ledger = std::make_shared<Ledger>();
  SlowCommunicator dp(ledger), tp(ledger, "tp");
  Trace trace(Device::CPU, kOneStep);
  {
    TraceScope scope(&trace);
    Work first = dp.slow(100, 1'000'000), second = dp.slow(120), other = tp.slow(10, 250);
    compute(50);
    for (Work* w : {&first, &second, &other}) w->wait();
    dp.barrier();
    dp.slow(1).wait();
    trace.step();
  }
  const Recording& r = trace.recording();
  auto first = find(r, Kind::Communication, "all_reduce dp 4.0 MB");
  auto second = find(r, Kind::Communication, "all_reduce dp 4 B");
  auto other = find(r, Kind::Communication, "all_reduce tp 1.0 kB");
  ASSERT_EQ(first.size(), 1u);
  ASSERT_EQ(second.size(), 2u);
  ASSERT_EQ(other.size(), 1u);
  EXPECT_NEAR(double(first[0].end - first[0].begin), 100 * kMs, 5 * kMs);
  // Both of dp's were under way at once: two lanes. Later the first is free again.
  EXPECT_EQ(r.networks, (std::vector<std::string>{"dp", "dp (2)", "tp"}));
  EXPECT_EQ(first[0].lane, (Lane{Lane::Network, 0}));
  EXPECT_EQ(second[0].lane, (Lane{Lane::Network, 1}));
  EXPECT_EQ(second[1].lane, (Lane{Lane::Network, 0}));
  EXPECT_EQ(other[0].lane, (Lane{Lane::Network, 2}));
  // The rank stood still for 50 ms or so, then for 20, and not for tp's.
  auto waits = find(r, Kind::Exposed, "wait all_reduce");
  ASSERT_EQ(waits.size(), 4u);
  EXPECT_EQ(waits[0].name, "wait all_reduce dp 4.0 MB");
  EXPECT_EQ(waits[0].lane, (Lane{Lane::Thread, 0}));
  EXPECT_LT(waits[0].end - waits[0].begin, 90 * kMs);
  EXPECT_GE(waits[0].end, first[0].end);
  EXPECT_LT(waits[2].end - waits[2].begin, 8 * kMs);
  EXPECT_EQ(find(r, Kind::Exposed, "launch barrier dp").size(), 1u);

  write_trace(dir / "t.json", {r});
  nlohmann::json file = nlohmann::json::parse(std::ifstream(dir / "t.json"));
  std::map<int, std::string> lanes;
  std::set<std::string> seen;
  for (const nlohmann::json& e : file.at("traceEvents")) {
    if (e.at("ph") == "M" && e.at("name") == "thread_name") lanes[e.at("tid")] = e["args"]["name"];
    if (e.at("ph") == "X")
      seen.insert(text(e.at("cat").get<std::string>(), ", ", e.at("name").get<std::string>(), ", ",
                       lanes.at(e.at("tid"))));
  }
  EXPECT_TRUE(seen.contains("communication, all_reduce dp 4.0 MB, network dp"));
  EXPECT_TRUE(seen.contains("communication, all_reduce dp 4 B, network dp (2)"));
  EXPECT_TRUE(seen.contains("communication, all_reduce tp 1.0 kB, network tp"));
  EXPECT_TRUE(seen.contains("exposed, wait all_reduce dp 4.0 MB, CPU thread 0"));
}

TEST(TraceComm, S13_OperationsOfAnotherWindowAreDropped) {
  auto ledger = std::make_shared<Ledger>();
  SlowCommunicator dp(ledger);
  Trace trace(Device::CPU, {.wait = 0, .warmup = 1, .active = 1});
  TraceScope scope(&trace);
  Work crosses = dp.slow(1, 100);
  trace.step();
  crosses.wait();
  dp.slow(1, 200).wait();
  trace.step();
  dp.slow(1, 300).wait();
  EXPECT_EQ(find(trace.recording(), Kind::Communication, "").size(), 1u);
  EXPECT_EQ(find(trace.recording(), Kind::Communication, "all_reduce dp 800 B").size(), 1u);
}

TEST(TraceComm, S13_ThreadsMoveMessagesWhenTheyLaunchAndWait) {
  TracedKernels before_the_threads_start;
  run_threads(2, Device::CPU, {}, [](Communicator& world) {
    Trace trace(Device::CPU, kOneStep, world.rank());
    TraceScope scope(&trace);
    Tensor t = Tensor::zeros({1000}, DType::F32, Device::CPU);
    Work sum = world.all_reduce(t);
    compute(10);
    sum.wait();
    trace.step();
    auto moved = find(trace.recording(), Kind::Communication, "all_reduce world 4.0 kB");
    ASSERT_EQ(moved.size(), 2u);
    EXPECT_GE(moved[1].begin - moved[0].end, 10 * kMs);
    EXPECT_EQ(find(trace.recording(), Kind::Exposed, "launch all_reduce").size(), 1u);
    EXPECT_EQ(find(trace.recording(), Kind::Exposed, "wait all_reduce").size(), 1u);
  });
}

// ---- Diagnosis ----

struct List {
  std::vector<TraceEvent> events;
  List& add(Kind kind, Lane::Type lane, const char* name, int64_t begin, int64_t end) {
    events.push_back({name, kind, {lane, 0}, begin, end, 1});
    return *this;
  }
  List& kernel(int64_t begin, int64_t end) {
    return add(Kind::Kernel, Lane::Stream, "work", begin, end);
  }
  List& moves(int64_t begin, int64_t end) {
    return add(Kind::Communication, Lane::Network, "all_reduce dp 1.0 MB", begin, end);
  }
  List& stands(int64_t begin, int64_t end) {
    return add(Kind::Exposed, Lane::Stream, "wait all_reduce dp 1.0 MB", begin, end);
  }
};

bool says(const List& l, const std::string& what) {
  return to_text(diagnose(l.events)).find(what) != std::string::npos;
}

TEST(TraceComm, S14_CommunicationAndComputationTakeTurns) {
  List serial;
  serial.kernel(0, 100).moves(101, 150).stands(100, 150).kernel(150, 250);
  Diagnosis d = diagnose(serial.events);
  EXPECT_EQ(d.communication, 49);
  EXPECT_EQ(d.hidden, 0);
  EXPECT_EQ(d.exposed, 50);
  EXPECT_EQ(d.idle, 50);
  EXPECT_TRUE(d.takes_turns());
  EXPECT_EQ(d.gaps.at(0).cause, Gap::Cause::Communication);
  EXPECT_EQ(d.lost.at(size_t(Gap::Cause::Communication)), 50);
  EXPECT_EQ(d.gaps.at(0).meanwhile, "wait all_reduce dp 1.0 MB");
  EXPECT_EQ(d.lanes, 1);  // the network is no compute lane
  EXPECT_TRUE(says(serial, "communication and computation take turns"));
  EXPECT_TRUE(says(serial, "the rank stood still for other ranks (wait all_reduce dp 1.0 MB)"));
  EXPECT_TRUE(says(serial, "exposed   20.0 %"));
}

TEST(TraceComm, S14_HiddenAndExposedShares) {
  List half, whole, none;
  half.kernel(0, 100).moves(75, 125).moves(80, 120).stands(100, 125).kernel(125, 225);
  Diagnosis d = diagnose(half.events);
  EXPECT_EQ(d.communication, 50);
  EXPECT_EQ(d.hidden, 25);
  EXPECT_EQ(d.exposed, 25);
  EXPECT_FALSE(d.takes_turns());
  EXPECT_TRUE(says(half, "50 % of that hidden\n")) << to_text(d);
  whole.kernel(0, 200).moves(50, 150).stands(200, 201);
  EXPECT_EQ(diagnose(whole.events).hidden, 100);
  EXPECT_FALSE(diagnose(whole.events).takes_turns());
  none.kernel(0, 200);
  EXPECT_FALSE(diagnose(none.events).takes_turns());
  EXPECT_FALSE(says(none, "network"));
}

// ---- Data parallelism ----

// One step's trace on each rank, after a first step that is not recorded.
void traced(Sync sync, LayoutRig::Settings settings,
            const std::function<void(const Recording&)>& see, int accumulation = 1) {
  TracedKernels before_the_threads_start;
  run_threads(2, Device::CPU, {}, [&](Communicator& world) {
    ProcessMesh mesh(world, {.dp = 2});
    TracedRig rig(mesh, settings, maker(sync));
    std::vector<MicroBatch> mine;
    for (int i = 0; i < accumulation; ++i)
      mine.push_back(random_batch(2, 8, 20, uint64_t(2 * i + world.rank())));
    rig.step(mine);
    Trace trace(Device::CPU, kOneStep, world.rank());
    TraceScope scope(&trace);
    rig.step(mine);
    trace.step();
    see(trace.recording());
  });
}

LayoutRig::Settings small_buckets() {
  LayoutRig::Settings s;
  s.parallel.bucket_bytes = 3000;
  return s;
}

// Launches of the gradients' sums: not the norm's.
std::vector<TraceEvent> launches(const Recording& r) {
  std::vector<TraceEvent> found;
  auto first = find(r, Kind::Host, "backward"), last = find(r, Kind::Host, "optimizer");
  for (const TraceEvent& e : find(r, Kind::Exposed, "launch all_reduce"))
    if (e.begin > first.at(0).begin && e.begin < last.at(0).begin) found.push_back(e);
  return found;
}

TEST(TraceComm, D1_NaiveSumsAfterBackward) {
  traced(Sync::Naive, {}, [](const Recording& r) {
    auto backward = find(r, Kind::Host, "backward");
    ASSERT_EQ(backward.size(), 1u);
    EXPECT_EQ(together(backward, find(r, Kind::Communication, "")), 0);
    ASSERT_FALSE(launches(r).empty());
    EXPECT_GE(launches(r)[0].begin, backward[0].end);
    EXPECT_TRUE(diagnose(r.events).takes_turns());
  });
}

TEST(TraceComm, D2_SumsAreLaunchedDuringBackward) {
  for (Sync sync : {Sync::Overlapped, Sync::Bucketed})
    traced(sync, small_buckets(), [&](const Recording& r) {
      auto backward = find(r, Kind::Host, "backward");
      ASSERT_EQ(backward.size(), 1u);
      auto started = launches(r);
      ASSERT_GT(started.size(), 2u) << name_of(sync);
      for (const TraceEvent& e : started) EXPECT_LT(e.begin, backward[0].end) << name_of(sync);
      // The first does not wait for the last gradient.
      auto embedding = find(r, Kind::Kernel, "embedding_backward");
      ASSERT_EQ(embedding.size(), 1u);
      EXPECT_LT(started[0].end, embedding[0].begin) << name_of(sync);
      for (const TraceEvent& e : find(r, Kind::Exposed, "wait all_reduce"))
        EXPECT_EQ(together({e}, backward), 0) << name_of(sync);  // nobody waits inside
    });
}

// Sums of whole gradients in one step of so many micro-batches, and the gradients.
struct Summed {
  int64_t sums = 0;
  size_t buckets = 0, parameters = 0;
  std::map<std::string, std::vector<double>> gradients;
};
Summed sums_of(Sync sync, int64_t bucket_bytes, int accumulation) {
  Summed out;
  Whole whole;
  run_threads(2, Device::CPU, {}, [&](Communicator& world) {
    ProcessMesh mesh(world, {.dp = 2});
    LayoutRig::Settings settings;
    settings.parallel.bucket_bytes = bucket_bytes;
    TracedRig rig(mesh, settings, maker(sync));
    std::vector<MicroBatch> mine;
    for (int i = 0; i < accumulation; ++i)
      mine.push_back(random_batch(2, 8, 20, uint64_t(2 * i + world.rank())));
    world.ledger().clear();
    rig.gradients(mine);
    whole.add(rig.parallel->owned(), &Owned::grad);
    if (world.rank() > 0) return;
    out.sums = world.ledger().sum(Collective::AllReduce, mesh.data().name()).calls;
    out.buckets = make_buckets({rig.model.get()}, bucket_bytes / 4).size();
    out.parameters = rig.model->parameters().size();
  });
  out.gradients = whole.get();
  return out;
}

TEST(TraceComm, D3_AsManySumsAsBuckets) {
  Summed overlapped = sums_of(Sync::Overlapped, 3000, 1);
  EXPECT_EQ(overlapped.sums, int64_t(overlapped.parameters));
  std::set<int64_t> counts;
  for (int64_t bytes : {1, 3000, 8000, 25'000'000}) {
    Summed bucketed = sums_of(Sync::Bucketed, bytes, 1);
    EXPECT_EQ(bucketed.sums, int64_t(bucketed.buckets)) << bytes;
    EXPECT_EQ(bucketed.gradients, overlapped.gradients) << bytes;
    counts.insert(bucketed.sums);
  }
  EXPECT_EQ(counts.size(), 4u);
  EXPECT_EQ(*counts.begin(), 1);  // the whole model is smaller than 25 MB
}

TEST(TraceComm, D4_AccumulationSumsOnce) {
  for (Sync sync : {Sync::Naive, Sync::Overlapped, Sync::Bucketed}) {
    Summed once = sums_of(sync, 3000, 1), thrice = sums_of(sync, 3000, 3);
    EXPECT_EQ(once.sums, thrice.sums) << name_of(sync);
    EXPECT_EQ(thrice.sums, int64_t(sync == Sync::Bucketed ? thrice.buckets : thrice.parameters));
  }
  // And not before the last micro-batch's backward.
  traced(
      Sync::Bucketed, small_buckets(),
      [](const Recording& r) {
        auto backward = find(r, Kind::Host, "backward");
        ASSERT_EQ(backward.size(), 3u);
        for (const TraceEvent& e : launches(r)) EXPECT_GT(e.begin, backward[2].begin);
      },
      3);
}

// ---- ZeRO ----

TEST(TraceComm, Z6_TheNextUnitIsOnItsWayBeforeThisOneComputes) {
  run_threads(2, Device::CPU, {}, [](Communicator& world) {
    ProcessMesh mesh(world, {.dp = 2});
    LayoutRig::Settings settings;
    settings.config.layers = 3;
    auto gathers = [&] { return world.ledger().sum(Collective::AllGather).calls; };
    int64_t units = 5;
    std::vector<int> order;
    auto watch = [&](Pass pass, int n) {
      order.push_back(n);
      // Gathered or on their way: forward, all up to n + 1; backward, all again down to n - 1,
      // less the head, which was kept.
      if (pass == Pass::Forward) {
        EXPECT_EQ(gathers(), std::min<int64_t>(n + 2, units)) << n;
      } else {
        EXPECT_EQ(gathers(), units + std::min<int64_t>(units - n, units - 1)) << n;
      }
    };
    TracedRig rig(mesh, settings, maker(Sync::Zero3), watch);
    for (int step = 0; step < 2; ++step) {
      order.clear();
      world.ledger().clear();
      rig.step({random_batch(2, 8, 20, uint64_t(world.rank()))});
      EXPECT_EQ(gathers(), 2 * units - 1);
      EXPECT_EQ(order, (std::vector<int>{0, 1, 2, 3, 4, 4, 3, 2, 1, 0}));
    }
  });
}

TEST(TraceComm, Z7_WeightsTravelDuringTheOptimizerStep) {
  run_threads(2, Device::CPU, {}, [](Communicator& world) {
    ProcessMesh mesh(world, {.dp = 2});
    TracedRig rig(mesh, small_buckets(), zero1(Zero1::Gather::DuringOptimizer));
    auto gathers = [&] { return world.ledger().sum(Collective::AllGather).calls; };
    int64_t buckets = gathers();  // allocating has published once
    ASSERT_GT(buckets, 2);
    for (int step = 0; step < 2; ++step) {
      world.ledger().clear();
      std::vector<int64_t> launched;  // when piece i was updated
      rig.gradients({random_batch(2, 8, 20, uint64_t(world.rank()))});
      EXPECT_EQ(gathers(), 0);
      rig.optimizer->step([&](size_t i) {
        rig.parallel->updated(i);
        launched.push_back(gathers());
      });
      ASSERT_EQ(launched.size(), rig.parallel->owned().size());
      EXPECT_EQ(launched.end()[-2], buckets - 1);  // all but the one that waits for the last piece
      EXPECT_EQ(launched.back(), buckets);
      for (size_t i = 1; i < launched.size(); ++i) EXPECT_LE(launched[i] - launched[i - 1], 1);
      rig.parallel->publish();
      EXPECT_EQ(gathers(), buckets);
    }
  });
}

TEST(TraceComm, Z7_WeightsTravelDuringTheNextForward) {
  TracedKernels before_the_threads_start;
  run_threads(2, Device::CPU, {}, [](Communicator& world) {
    ProcessMesh mesh(world, {.dp = 2});
    TracedRig rig(mesh, small_buckets(), zero1(Zero1::Gather::DuringForward));
    int64_t buckets = world.ledger().sum(Collective::AllGather).calls;
    std::vector<MicroBatch> mine = {random_batch(2, 8, 20, uint64_t(world.rank()))};
    Trace trace(Device::CPU, {.wait = 0, .warmup = 0, .active = 2}, world.rank());
    TraceScope scope(&trace);
    for (int step = 0; step < 2; ++step) {
      rig.step(mine);
      trace.step();
    }
    const Recording& r = trace.recording();
    auto publish = find(r, Kind::Host, "publish"), forward = find(r, Kind::Host, "forward");
    auto in = [](const TraceEvent& e, const TraceEvent& part) {
      return e.begin >= part.begin && e.end <= part.end;
    };
    int64_t launched = 0, waited = 0;
    std::vector<TraceEvent> waits;
    for (const TraceEvent& e : find(r, Kind::Exposed, "launch all_gather"))
      launched += in(e, publish.at(0));
    for (const TraceEvent& e : find(r, Kind::Exposed, "wait all_gather")) {
      EXPECT_FALSE(in(e, publish[0]));
      if (!in(e, forward.at(1))) continue;
      ++waited;
      waits.push_back(e);
    }
    EXPECT_EQ(launched, buckets);
    ASSERT_EQ(waited, buckets);
    // Each unit waits for its own weights only: the embedding has computed before the head's come.
    auto embedding = find(r, Kind::Host, "unit 0"), head = find(r, Kind::Host, "unit 3");
    EXPECT_GT(waits.back().begin, embedding.at(1).end);
    EXPECT_LT(waits.back().end, head.at(1).begin);
  });
}

}  // namespace
}  // namespace lockstep
