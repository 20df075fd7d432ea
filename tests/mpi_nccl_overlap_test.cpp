// What is hidden behind computation on GPUs over NCCL, where all times are events in streams. Runs
// under mpirun with 2 ranks, each with a GPU:
//
//   mpirun -n 2 tests/nccl_hostid.sh build/tests/mpi_nccl_overlap_test

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <set>

#include "common/device.h"
#include "common/gpu_ranks.h"
#include "common/overlap_meter.h"
#include "tests/mpi/main.h"
#include "tests/traced_layout.h"

namespace lockstep {
namespace {

using Kind = TraceEvent::Kind;
using Lane = TraceEvent::Lane;
using Clock = std::chrono::steady_clock;
constexpr int kSteps = 5;

// One world for all tests: making one takes NCCL seconds.
class NcclOverlap : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    if (!device::available() || this_job().size() < 2) return;
    auto processes = fresh_world();
    world_ =
        start_gpu_ranks(*processes, this_job().host().first, std::getenv("NCCL_HOSTID"),
                        std::make_shared<Ledger>(), {.time_limit = 60, .copy_from = INT64_MAX});
  }
  static void TearDownTestSuite() { world_.reset(); }
  void SetUp() override {
    if (!world_) GTEST_SKIP() << "this needs GPUs and at least two ranks";
    world_->barrier();
  }
  static inline std::unique_ptr<Communicator> world_;

  struct Seen {
    Recording recording;
    OverlapMeter::Sum data;
  };
  // Some 50 million parameters, gradients in buckets of 10 MB.
  static Seen run(const TracedRig::Make& make, int sequences = 8) {
    ProcessMesh mesh(*world_, {.dp = world_->size()});
    LayoutRig::Settings s;
    s.device = Device::CUDA;
    s.compute = DType::BF16;
    s.config.layers = 8;
    s.config.hidden = 768;
    s.config.heads = 12;
    s.config.kv_heads = 12;
    s.config.head_dim = 64;
    s.config.ffn = 2048;
    s.config.vocab = 4096;
    s.config.init_std = 0.02;
    s.parallel.bucket_bytes = 10'000'000;
    TracedRig rig(mesh, s, make);
    std::vector<MicroBatch> mine = {
        random_batch(sequences, 512, s.config.vocab, uint64_t(world_->rank()), 0, Device::CUDA)};
    for (int i = 0; i < 3; ++i) rig.step(mine);

    // Measured without a trace, whose events would lengthen the steps.
    OverlapMeter meter(world_->ledger(), Device::CUDA);
    for (int i = 0; i < kSteps; ++i) rig.step(mine);
    device::synchronize();
    OverlapMeter::Sum data = meter.read().sum(mesh.data().name(), 1000);

    Trace trace(Device::CUDA, {.wait = 0, .warmup = 1, .active = kSteps}, world_->rank());
    TraceScope scope(&trace);
    for (int i = 0; i < kSteps + 1; ++i) {
      rig.step(mine);
      trace.step();
    }
    return {trace.recording(), data};
  }
  // When kernels of backward ran: the host's parts run ahead of the stream.
  static std::vector<Interval> backward_kernels(const Recording& r) {
    std::vector<Interval> out;
    for (const TraceEvent& e : find(r, Kind::Kernel, ""))
      if (e.name.find("_backward") != std::string::npos) out.push_back({e.begin, e.end});
    return out;
  }
};

TEST_F(NcclOverlap, D1_D2_ExposedTimeOfNaiveIsTheLongest) {
  Seen naive = run(maker(Sync::Naive)), overlapped = run(maker(Sync::Overlapped));
  Seen bucketed = run(maker(Sync::Bucketed));
  for (const auto& [name, seen] : {std::pair{"naive", &naive}, std::pair{"overlapped", &overlapped},
                                   std::pair{"bucketed", &bucketed}})
    std::printf("%-10s %s\n", name, line(seen->data, kSteps).c_str());
  EXPECT_EQ(naive.data.payload, bucketed.data.payload);
  EXPECT_EQ(naive.data.operations, overlapped.data.operations);
  EXPECT_LT(bucketed.data.operations, naive.data.operations);
  // Not all: where the host is late, a small sum is half over before the stream is told to wait.
  EXPECT_GT(naive.data.exposed_share(), 0.6);
  EXPECT_LT(bucketed.data.exposed, 0.7 * naive.data.exposed);
  EXPECT_LT(overlapped.data.exposed, naive.data.exposed);
  EXPECT_LT(bucketed.data.exposed_share(), 0.5);
}

// backward is over when the embedding's gradient is there.
TEST_F(NcclOverlap, D1_D2_TracesShowWhatRunsBesideBackward) {
  Seen naive = run(maker(Sync::Naive)), bucketed = run(maker(Sync::Bucketed));
  auto beside = [](const Recording& r) {
    return common_length(times(find(r, Kind::Communication, "all_reduce")), backward_kernels(r));
  };
  EXPECT_EQ(beside(naive.recording), 0);
  EXPECT_GT(beside(bucketed.recording), 0);
  Diagnosis turns = diagnose(naive.recording.events), hidden = diagnose(bucketed.recording.events);
  EXPECT_TRUE(turns.takes_turns()) << to_text(turns);
  EXPECT_FALSE(hidden.takes_turns()) << to_text(hidden);
  EXPECT_GT(turns.exposed, hidden.exposed);
}

TEST_F(NcclOverlap, S13_SpansOnTheirLanes) {
  const Recording r = run(maker(Sync::Bucketed)).recording;
  std::vector<TraceEvent> moving = find(r, Kind::Communication, "");
  std::vector<TraceEvent> waits = find(r, Kind::Exposed, "wait all_reduce");
  ASSERT_FALSE(moving.empty());
  EXPECT_EQ(moving.size(), waits.size());
  int64_t end = 0;
  std::set<int> lanes;
  for (const TraceEvent& e : moving) {
    EXPECT_EQ(e.lane.type, Lane::Network);
    lanes.insert(e.lane.number);
    EXPECT_LE(e.begin, e.end);
    EXPECT_LT(e.end - e.begin, 1'000'000'000);
    EXPECT_GE(e.begin, 0);
    end = std::max(end, e.end);
  }
  EXPECT_EQ(lanes.size(), r.networks.size());
  EXPECT_LE(lanes.size(), 2u);  // "world" and the data group; a stream runs one after the other
  for (const TraceEvent& e : waits) EXPECT_EQ(e.lane.type, Lane::Stream);
  // The host's part of a launch is a part of its thread.
  EXPECT_EQ(find(r, Kind::Host, "launch all_reduce").size(), moving.size());
}

// The GPU has milliseconds of work before the sums can start; measuring makes nobody wait for them.
TEST_F(NcclOverlap, MeasuringMakesNoHostWait) {
  OverlapMeter meter(world_->ledger(), Device::CUDA);
  Tensor x = Tensor::zeros({1 << 26}, DType::F32, Device::CUDA);
  world_->all_reduce(x).wait();
  device::synchronize();
  (void)meter.read();
  double best = 1;
  int64_t unread = 0;
  for (int attempt = 0; attempt < 5; ++attempt) {
    world_->barrier();
    device::synchronize();
    (void)meter.read();
    for (int i = 0; i < 200; ++i) on(x).fill(x, i);
    auto start = Clock::now();
    world_->all_reduce(x).wait();
    int64_t read = meter.read().sum().operations;
    double seconds = std::chrono::duration<double>(Clock::now() - start).count();
    if (seconds < best) {
      best = seconds;
      unread = 1 - read;
    }
  }
  EXPECT_LT(best, 1e-3);
  EXPECT_EQ(unread, 1);  // the reading did not wait for it either
  device::synchronize();
  OverlapMeter::Sum sum = meter.read().sum();
  EXPECT_EQ(sum.operations, 1);
  EXPECT_GT(sum.under_way, 0);
  EXPECT_GT(sum.exposed, 0);
  EXPECT_LT(sum.exposed, 1);
}

// Two waits behind work that is long enough hide everything; without it nothing is hidden.
TEST_F(NcclOverlap, ExposedAndHiddenTimes) {
  OverlapMeter meter(world_->ledger(), Device::CUDA);
  Tensor x = Tensor::zeros({1 << 24}, DType::F32, Device::CUDA);
  Tensor y = Tensor::zeros({1 << 26}, DType::F32, Device::CUDA);
  auto measure = [&](int fills) {
    world_->all_reduce(x).wait();
    world_->barrier();
    device::synchronize();
    (void)meter.read();
    Work sum = world_->all_reduce(x);
    for (int i = 0; i < fills; ++i) on(y).fill(y, i);
    sum.wait();
    device::synchronize();
    return meter.read().sum();
  };
  (void)measure(0);
  OverlapMeter::Sum alone = measure(0), beside = measure(100);
  EXPECT_GT(alone.exposed_share(), 0.7);
  EXPECT_LT(beside.exposed_share(), 0.3);
}

TEST_F(NcclOverlap, Z6_GathersRunBesideTheNeighboursKernels) {
  // So many tokens that the GPUs, not the hosts, decide when a rank comes to a gather: over NCCL
  // the first to come waits for the last.
  const Recording r = run(maker(Sync::Zero3), 64).recording;
  auto gathers = times(find(r, Kind::Communication, "all_gather"));
  ASSERT_FALSE(gathers.empty());
  int64_t hidden = common_length(gathers, times(find(r, Kind::Kernel, "")));
  EXPECT_GT(double(hidden), 0.5 * double(length_of(united(gathers))));
}

}  // namespace
}  // namespace lockstep
