// What a trace records of a real training step, and when.

#include "common/trace.h"

#include <gtest/gtest.h>

#include <map>
#include <nlohmann/json.hpp>
#include <set>

#include "tests/rig.h"
#include "tests/temporary.h"

namespace lockstep {
namespace {

using Kind = TraceEvent::Kind;
using Lane = TraceEvent::Lane;
using Phase = TraceSchedule::Phase;

// A step as a program traces it.
void traced_step(Rig& rig, Trace& trace, const MicroBatch& batch) {
  Span part(&trace, "data", Kind::Data);
  Tensor valid = rig.valid({batch});
  part.next("gradients");
  rig.gradients({batch}, valid);
  part.next("optimizer");
  rig.optimizer->step();
  rig.parallel.publish();
}

class Traced : public ::testing::TestWithParam<Device> {
 protected:
  Rig::Settings settings() const {
    Rig::Settings s;
    s.device = GetParam();
    return s;
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, Traced,
                         ::testing::ValuesIn(device::available()
                                                 ? std::vector<Device>{Device::CPU, Device::CUDA}
                                                 : std::vector<Device>{Device::CPU}),
                         [](const auto& info) {
                           return std::string(info.param == Device::CPU ? "CPU" : "CUDA");
                         });

TEST(Trace, S13_PhasesOfTheSchedule) {
  TraceSchedule once, twice{.wait = 0, .warmup = 1, .active = 2, .repeat = 2};
  std::vector<Phase> phases;
  for (int64_t i = 0; i < 7; ++i) phases.push_back(once.phase(i));
  EXPECT_EQ(phases, (std::vector<Phase>{Phase::Wait, Phase::Warmup, Phase::Active, Phase::Active,
                                        Phase::Active, Phase::Done, Phase::Done}));
  phases.clear();
  for (int64_t i = 0; i < 7; ++i) phases.push_back(twice.phase(i));
  EXPECT_EQ(phases, (std::vector<Phase>{Phase::Warmup, Phase::Active, Phase::Active, Phase::Warmup,
                                        Phase::Active, Phase::Active, Phase::Done}));
  twice.repeat = 0;
  EXPECT_EQ(twice.phase(300), Phase::Warmup);
}

TEST_P(Traced, S13_ScheduleWaitWarmupActive) {
  TemporaryFolder dir;
  Rig rig(settings());
  MicroBatch batch = random_batch(2, 8, 20, 1, 0, GetParam());
  Trace trace(GetParam());
  std::vector<bool> complete;
  {
    TraceScope scope(&trace);
    for (int i = 1; i <= 7; ++i) {
      traced_step(rig, trace, batch);
      complete.push_back(trace.step());
    }
  }
  EXPECT_EQ(complete, (std::vector<bool>{0, 0, 0, 0, 1, 0, 0}));
  std::string path = dir / "trace.json";
  write_trace(path, {trace.recording()});
  nlohmann::json file = nlohmann::json::parse(std::ifstream(path));

  std::map<int, std::string> lanes;
  std::map<std::string, int> steps;  // of each name
  std::set<int> active;
  bool memory = false;
  for (const nlohmann::json& e : file.at("traceEvents")) {
    EXPECT_EQ(e.at("pid"), 0);
    if (e.at("ph") == "M") {
      if (e.at("name") == "thread_name") lanes[e.at("tid")] = e.at("args").at("name");
    } else if (e.at("ph") == "C") {
      memory = true;
      EXPECT_GT(e.at("args").at("weights"), 0);
    } else {
      EXPECT_EQ(e.at("ph"), "X");
      EXPECT_GE(e.at("dur"), 0);
      active.insert(e.at("args").at("step").get<int>());
      std::string where = lanes.at(e.at("tid")).substr(0, 4);
      ++steps[e.at("cat").get<std::string>() + " " + e.at("name").get<std::string>() + " " + where];
    }
  }
  EXPECT_EQ(active, (std::set<int>{3, 4, 5}));
  EXPECT_TRUE(memory);
  EXPECT_EQ(steps["step step CPU "], 3);
  EXPECT_EQ(steps["data data CPU "], 3);
  EXPECT_EQ(steps["host gradients CPU "], 3);
  bool gpu = GetParam() == Device::CUDA;
  // Of each block: q|k|v, o, gate|up and down; and the head. Three products for each.
  int matmuls = 3 * 3 * (2 * 4 + 1);
  EXPECT_EQ(steps["launch matmul CPU "], gpu ? matmuls : 0);
  EXPECT_EQ(steps["kernel matmul CUDA"], gpu ? matmuls : 0);
  EXPECT_EQ(steps["kernel matmul CPU "], gpu ? 0 : matmuls);
  const char* where = gpu ? " CUDA" : " CPU ";
  for (const char* kernel : {"embedding", "rmsnorm", "rope", "attention", "swiglu", "cross_entropy",
                             "attention_backward", "begin_update", "adamw"})
    EXPECT_GT(steps[std::string("kernel ") + kernel + where], 0) << kernel;
}

// Any two spans of a lane lie one in the other or do not touch, and those of a step lie in it.
TEST_P(Traced, S13_SpansNestAndKernelsOfAStreamAreInOrder) {
  Rig rig(settings());
  MicroBatch batch = random_batch(2, 8, 20, 1, 0, GetParam());
  Trace trace(GetParam());
  TraceScope scope(&trace);
  for (int i = 1; i <= 5; ++i) {
    traced_step(rig, trace, batch);
    trace.step();
  }
  const std::vector<TraceEvent>& events = trace.recording().events;
  ASSERT_GT(events.size(), 100u);
  std::map<std::pair<int, int>, std::vector<const TraceEvent*>> open;
  std::vector<std::string> launched, ran;
  for (const TraceEvent& e : events) {
    ASSERT_LE(e.begin, e.end);
    auto& stack = open[{e.lane.type, e.lane.number}];
    while (!stack.empty() && stack.back()->end <= e.begin) stack.pop_back();
    if (!stack.empty()) {
      EXPECT_LE(e.end, stack.back()->end) << e.name << " in " << stack.back()->name;
    }
    if (e.lane.type == Lane::Thread && e.kind != Kind::Step) {
      ASSERT_FALSE(stack.empty()) << e.name;
      EXPECT_EQ(stack[0]->kind, Kind::Step);
      EXPECT_EQ(stack[0]->step, e.step);
    }
    if (e.lane.type == Lane::Stream) {
      EXPECT_TRUE(stack.empty()) << "two kernels of one stream at once";
      ran.push_back(e.name);
    }
    if (e.kind == Kind::Launch) launched.push_back(e.name);
    stack.push_back(&e);
  }
  EXPECT_EQ(ran, launched);
  EXPECT_EQ(ran.empty(), GetParam() == Device::CPU);
}

// A kernel does not begin before its launch has returned, whatever the clocks say.
TEST_P(Traced, S13_KernelsRunAfterTheirLaunch) {
  Rig rig(settings());
  MicroBatch batch = random_batch(2, 8, 20, 1, 0, GetParam());
  Trace trace(GetParam(), {.wait = 0, .warmup = 1, .active = 1});
  TraceScope scope(&trace);
  for (int i = 0; i < 2; ++i) {
    traced_step(rig, trace, batch);
    device::synchronize();
    trace.step();
  }
  std::vector<const TraceEvent*> launches, runs;
  for (const TraceEvent& e : trace.recording().events) {
    if (e.kind == Kind::Launch) launches.push_back(&e);
    if (e.lane.type == Lane::Stream) runs.push_back(&e);
  }
  ASSERT_EQ(launches.size(), runs.size());
  EXPECT_EQ(runs.empty(), GetParam() == Device::CPU);
  int64_t step_end = trace.recording().events.at(0).end;
  for (size_t i = 0; i < runs.size(); ++i) {
    EXPECT_GE(runs[i]->begin, std::min(launches[i]->end, runs[i]->end)) << runs[i]->name;
    EXPECT_GT(runs[i]->end, launches[i]->begin - 20'000) << runs[i]->name;
    EXPECT_LT(runs[i]->end, step_end + 20'000) << runs[i]->name;  // the step ended with a wait
  }
}

TEST_P(Traced, S13_MemoryCountersEqualTheAccount) {
  Trace trace(GetParam(), {.wait = 0, .warmup = 0, .active = 1});
  std::vector<std::pair<int64_t, int64_t>> expected;  // activations, buffers
  auto account = [&] {
    expected.push_back(
        {memory_account()->now(Category::Activations), memory_account()->now(Category::Buffers)});
  };
  {
    Span part(&trace, "one");
    Tensor kept = Tensor::empty({100}, DType::F32, GetParam());
    part.next("two");
    account();
    Tensor more = Tensor::empty({50}, DType::F32, GetParam(), Category::Buffers);
    part.next("unchanged");
    account();
  }
  trace.instant("freed");
  account();
  trace.step();
  ASSERT_EQ(trace.recording().memory.size(), 3u);  // where nothing changed there is no sample
  for (size_t i = 0; i < 3; ++i) {
    const MemorySample& s = trace.recording().memory[i];
    EXPECT_EQ(s.bytes[size_t(Category::Activations)], expected[i].first);
    EXPECT_EQ(s.bytes[size_t(Category::Buffers)], expected[i].second);
  }
  EXPECT_EQ(expected[0].first - expected[2].first, 400);
  EXPECT_EQ(expected[1].second - expected[0].second, 200);
}

TEST_P(Traced, S13_MemoryRisesInForwardAndFallsInBackward) {
  Rig rig(settings());
  MicroBatch batch = random_batch(2, 8, 20, 1, 0, GetParam());
  Tensor valid = rig.valid({batch});
  Trace trace(GetParam(), {.wait = 0, .warmup = 0, .active = 1});
  {
    TraceScope scope(&trace);
    rig.gradients({batch}, valid);
    trace.step();
  }
  std::vector<int64_t> activations;
  for (const MemorySample& s : trace.recording().memory)
    activations.push_back(s.bytes[size_t(Category::Activations)]);
  ASSERT_GT(activations.size(), 20u);
  auto peak = std::max_element(activations.begin(), activations.end());
  EXPECT_GT(*peak, 4 * activations.front());
  EXPECT_GT(*peak, 4 * activations.back());
  EXPECT_GT(peak - activations.begin(), 5);
  EXPECT_GT(activations.end() - peak, 5);
}

// Helper threads have lanes, and streams, of their own; ranks are processes of the picture.
TEST_P(Traced, S13_ThreadsAndRanksHaveLanesOfTheirOwn) {
  TemporaryFolder dir;
  TracedKernels before_the_threads_start;
  Trace first(GetParam(), {.wait = 0, .warmup = 0, .active = 1}, 0);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  Trace second(GetParam(), {.wait = 0, .warmup = 0, .active = 1}, 1);
  auto work = [](Trace* trace) {
    TraceScope scope(trace);
    Tensor t = Tensor::empty({1000}, DType::F32, trace ? GetParam() : Device::CPU);
    on(t).fill(t, 1);
    on(t).add_into(t, t);
    device::synchronize();
  };
  std::thread helper(work, &first), rank(work, &second), stranger(work, nullptr);
  work(&first);
  helper.join();
  rank.join();
  stranger.join();
  first.step();
  second.step();

  write_trace(dir / "two.json", {first.recording(), second.recording()});
  nlohmann::json file = nlohmann::json::parse(std::ifstream(dir / "two.json"));
  std::map<std::pair<int, std::string>, int> fills;  // by rank and lane
  std::map<std::pair<int, int>, std::string> lanes;
  std::map<int, double> begin;
  for (const nlohmann::json& e : file.at("traceEvents")) {
    std::pair<int, int> lane{e.at("pid"), e.at("tid")};
    if (e.at("ph") == "M" && e.at("name") == "thread_name") lanes[lane] = e.at("args").at("name");
    if (e.at("ph") != "X") continue;
    if (e.at("name") == "fill" && e.at("cat") == "kernel") ++fills[{lane.first, lanes.at(lane)}];
    if (e.at("name") == "step") begin[lane.first] = e.at("ts");
  }
  std::string lane = GetParam() == Device::CUDA ? "CUDA stream " : "CPU thread ";
  EXPECT_EQ(fills, (std::map<std::pair<int, std::string>, int>{
                       {{0, lane + "0"}, 1}, {{0, lane + "1"}, 1}, {{1, lane + "0"}, 1}}));
  // One clock: what began 20 ms later stands 20 ms further to the right.
  EXPECT_GT(begin.at(1) - begin.at(0), 19e3);
  EXPECT_LT(begin.at(1) - begin.at(0), 5e6);
}

TEST_P(Traced, ChangesNoResultAndLeavesTheTableAsItWas) {
  Kernels before = kernels(GetParam());
  auto run = [&](bool traces) {
    Rig rig(settings());
    Trace trace(GetParam(), {.wait = 0, .warmup = 1, .active = 2});
    TraceScope scope(traces ? &trace : nullptr);
    for (uint64_t i = 0; i < 4; ++i) {
      rig.step({random_batch(2, 8, 20, i, 0, GetParam())});
      trace.step();
    }
    EXPECT_EQ(trace.recording().events.size() > 50, traces);
    return rig.state().loss;
  };
  EXPECT_EQ(run(true), run(false));
  EXPECT_EQ(std::memcmp(&before, &kernels(GetParam()), sizeof before), 0);
  {
    TracedKernels outer;
    EXPECT_NE(before.adamw, kernels(GetParam()).adamw);
    { TracedKernels inner; }
    EXPECT_NE(before.adamw, kernels(GetParam()).adamw);
  }
  EXPECT_EQ(before.adamw, kernels(GetParam()).adamw);
}

TEST(Trace, NullTraceRecordsNothingAndSpansOfTwoWindowsAreDropped) {
  Span nothing(nullptr, "nothing");
  nothing.next("still nothing");
  Trace trace(Device::CPU, {.wait = 0, .warmup = 1, .active = 1});
  Span crosses(&trace, "crosses");
  trace.step();
  crosses.next("inside");
  crosses.end();
  trace.step();
  std::vector<std::string> names;
  for (const TraceEvent& e : trace.recording().events) names.push_back(e.name);
  EXPECT_EQ(names, (std::vector<std::string>{"step", "inside"}));
}

}  // namespace
}  // namespace lockstep
