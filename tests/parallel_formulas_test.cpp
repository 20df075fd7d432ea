// What data parallelism and ZeRO should cost, against the sources' numbers and numbers worked out
// by hand; and the program that plans a run with them.

#include "common/parallel_formulas.h"

#include <gtest/gtest.h>

#include <cstdio>
#include <map>
#include <sstream>

#include "02_data_parallel/recipe.h"
#include "common/options.h"
#include "tests/shell.h"

namespace lockstep {
namespace {

constexpr int64_t kMillion = 1'000'000;

TEST(ParallelFormulas, Z1_OptimizerStatesAreCut) {
  double psi = 7.5e9, n = 64, k = 12;  // the example of Rajbhandari et al., figure 1
  EXPECT_DOUBLE_EQ(psi * zero_bytes_per_parameter(0, n), (2 + 2 + k) * psi);
  EXPECT_DOUBLE_EQ(psi * zero_bytes_per_parameter(1, n), 2 * psi + 2 * psi + k * psi / n);
  EXPECT_NEAR(psi * zero_bytes_per_parameter(1, n) / 1e9, 31.4, 0.05);
}

TEST(ParallelFormulas, Z2_AndGradients) {
  double psi = 7.5e9, n = 64, k = 12;
  EXPECT_DOUBLE_EQ(psi * zero_bytes_per_parameter(2, n), 2 * psi + (2 + k) * psi / n);
  EXPECT_NEAR(psi * zero_bytes_per_parameter(2, n) / 1e9, 16.6, 0.05);
  // "Up to 8x": 16 bytes against the 2 of the weights, with very many ranks.
  EXPECT_NEAR(zero_bytes_per_parameter(0, 1e6) / zero_bytes_per_parameter(2, 1e6), 8, 1e-3);
  EXPECT_LT(zero_bytes_per_parameter(0, 64) / zero_bytes_per_parameter(2, 64), 8);
}

TEST(ParallelFormulas, Z3_AndWeights) {
  double psi = 7.5e9, n = 64, k = 12;
  EXPECT_DOUBLE_EQ(psi * zero_bytes_per_parameter(3, n), (4 + k) * psi / n);
  EXPECT_NEAR(psi * zero_bytes_per_parameter(3, n) / 1e9, 1.9, 0.05);
  for (int stage : {1, 2, 3})
    EXPECT_LT(zero_bytes_per_parameter(stage, 64), zero_bytes_per_parameter(stage - 1, 64));
  for (int stage : {0, 1, 2, 3}) EXPECT_EQ(zero_bytes_per_parameter(stage, 1), 16);
}

TEST(ParallelFormulas, Z4_SeventyBillionOn64Gpus) {
  const double gigabytes[] = {1120, 293, 155, 17.5}, times[] = {1, 1, 1, 1.5};
  for (int stage : {0, 1, 2, 3}) {
    EXPECT_NEAR(70 * zero_bytes_per_parameter(stage, 64), gigabytes[stage], 0.5) << stage;
    EXPECT_EQ(double(zero_volume(stage, 1000, 1)) / double(zero_volume(0, 1000, 1)), times[stage]);
  }
  EXPECT_DOUBLE_EQ(70 * zero_bytes_per_parameter(3, 64), 17.5);
}

// With accumulation the stages differ: 2 and 3 reduce every micro-batch.
TEST(ParallelFormulas, VolumesByHand) {
  // 1000 parameters, three micro-batches, a head of 100.
  EXPECT_EQ(zero_volume(0, 1000, 3), 2000);
  EXPECT_EQ(zero_volume(1, 1000, 3), 2000);
  EXPECT_EQ(zero_volume(2, 1000, 3), 3 * 1000 + 1000);
  EXPECT_EQ(zero_volume(3, 1000, 3), 3 * 3000);
  EXPECT_EQ(zero_volume(3, 1000, 3, 100), 3 * (1000 + 2 * 900 + 100));
  EXPECT_DOUBLE_EQ(on_the_wire(2000, 4), 1500);
  EXPECT_EQ(on_the_wire(2000, 1), 0);
  // Two blocks: E 0 1 H forward, then 1 0 E.
  EXPECT_EQ(zero3_gathers(zero3_units(2)), 7);
  EXPECT_EQ(zero3_gathers(2), 3);  // the source's, of the blocks alone
}

TEST(ParallelFormulas, Pitfall13_BytesOfEveryStageOnFourRanks) {
  int64_t n = kMillion;
  auto per_parameter = [n](int stage, DType gradients) {
    return double(zero_memory(n, DType::BF16, gradients, stage, 4).total()) / double(n);
  };
  const double narrow[] = {16, 7, 5.5, 4}, wide[] = {18, 9, 6, 4.5};
  for (int stage : {0, 1, 2, 3}) {
    EXPECT_EQ(per_parameter(stage, DType::BF16), narrow[stage]) << stage;
    EXPECT_EQ(per_parameter(stage, DType::F32), wide[stage]) << stage;
    EXPECT_EQ(zero_bytes_per_parameter(stage, 4), narrow[stage]);
    EXPECT_EQ(zero_bytes_per_parameter(stage, 4, {.gradient = 4}), wide[stage]);
  }
  EXPECT_THROW(zero_memory(n, DType::BF16, DType::BF16, 4, 4), Error);
}

// 19 elements on 8 ranks: shards of 3, rank 6 owns one element and rank 7 none.
TEST(ParallelFormulas, PaddingIsInWeightsAndGradientsOnly) {
  auto at = [](int stage, int rank) {
    return zero_memory({19}, DType::BF16, DType::F32, stage, {rank, 8});
  };
  for (int stage : {1, 2, 3}) {
    EXPECT_EQ(at(stage, 0).master, 3 * 4);
    EXPECT_EQ(at(stage, 6).master, 1 * 4);
    EXPECT_EQ(at(stage, 7).master, 0);
    EXPECT_EQ(at(stage, 7).moments, 0);
  }
  EXPECT_EQ(at(0, 7).weights, 19 * 2);
  EXPECT_EQ(at(1, 7).weights, 24 * 2);
  EXPECT_EQ(at(1, 7).gradients, 24 * 4);
  EXPECT_EQ(at(2, 7).weights, 24 * 2);
  EXPECT_EQ(at(2, 7).gradients, 3 * 4);
  EXPECT_EQ(at(3, 7).weights, 3 * 2);
  // Each bucket is padded for itself.
  EXPECT_EQ(zero_memory({5, 5}, DType::BF16, DType::F32, 1, {0, 4}).weights, 2 * 8 * 2);
  EXPECT_EQ(zero_memory({19}, DType::F32, DType::F32, 1, {0, 8}).master, 0);  // the weight itself
}

// The printed formula says N / (2 tokens) and has no size of an element: seconds per second it is
// not.
TEST(ParallelFormulas, D9_GradientsHideBehindBackward) {
  Hardware h100{989e12, 50e9};
  // 2 bytes / (2 x 8192) x 127/128 x 989e12 / 50e9
  EXPECT_NEAR(gradient_overlap(8e9, 8192, 128, 2, h100), 2.0 / 16384 * 127 / 128 * 19780, 1e-9);
  EXPECT_DOUBLE_EQ(gradient_overlap(8e9, 8192, 128, 2, h100),
                   gradient_overlap(1e6, 8192, 128, 2, h100));  // the model's size cancels
  EXPECT_DOUBLE_EQ(gradient_overlap(8e9, 8192, 128, 4, h100),
                   2 * gradient_overlap(8e9, 8192, 128, 2, h100));  // fp32 gradients
  EXPECT_DOUBLE_EQ(gradient_overlap(8e9, 16384, 128, 2, h100),
                   gradient_overlap(8e9, 8192, 128, 2, h100) / 2);  // twice the tokens
  EXPECT_EQ(gradient_overlap(8e9, 8192, 1, 2, h100), 0);
  // With times: 16e9 bytes, twice 127/128 of them, against 4 x 8e9 x 8192 operations.
  double sending = 2 * 16e9 * 127 / 128 / 50e9, computing = 4 * 8e9 * 8192 / 989e12;
  EXPECT_NEAR(gradient_overlap(8e9, 8192, 128, 2, h100), sending / computing, 1e-9);
}

TEST(ParallelFormulas, Z10_GathersHideBehindABlock) {
  Hardware h100{989e12, 50e9};
  double tokens = 4096 * 2;  // sequence x micro-batch
  for (double h : {1024., 8192.}) {
    double sending = 16 * h * h * 63 / (64 * 50e9) * 2;  // 2 bytes each
    double computing = 32 * tokens * h * h / 989e12;
    EXPECT_NEAR(gather_overlap(h, tokens, 64, 2, h100), sending / computing, 1e-9);
  }
  EXPECT_DOUBLE_EQ(gather_overlap(1024, tokens, 64, 2, h100),
                   gather_overlap(8192, tokens, 64, 2, h100));
  EXPECT_DOUBLE_EQ(gather_overlap(1024, tokens, 64, 2, h100),
                   gradient_overlap(1e9, tokens, 64, 2, h100));
}

TEST(Recipe, D5_FourMillionTokensOn128And512Gpus) {
  EXPECT_EQ(sequences_in(4 << 20, 4096), 1024);
  EXPECT_EQ(accumulation_steps(4 << 20, 4096, 2, 128), 4);
  EXPECT_EQ(accumulation_steps(4 << 20, 4096, 2, 512), 1);
}

TEST(Recipe, D6_MicroBatchGrowsUntilItDoesNotFit) {
  std::vector<int64_t> tried;
  auto needs = [&](int64_t sequences) {
    tried.push_back(sequences);
    return 100 + 30 * sequences;
  };
  EXPECT_EQ(largest_micro_batch(220, needs), 4);  // exactly
  EXPECT_EQ(tried, (std::vector<int64_t>{1, 2, 4, 8, 6, 5}));
  EXPECT_EQ(largest_micro_batch(219, needs), 3);
  EXPECT_EQ(largest_micro_batch(129, needs), 0);
  EXPECT_EQ(largest_micro_batch(INT64_MAX, needs), kMostSequences);
}

TEST(Recipe, NearestDivisors) {
  for (int64_t n = 1; n <= 60; ++n)
    for (int64_t x = 1; x <= 70; ++x) {
      std::vector<int64_t> nearest;
      for (int64_t d = std::min(x, n); nearest.empty(); --d)
        if (n % d == 0) nearest.push_back(d);
      for (int64_t d = x + 1; d <= n && nearest.size() < 2; ++d)
        if (n % d == 0) nearest.push_back(d);
      EXPECT_EQ(nearest_divisors(n, x), nearest) << n << ' ' << x;
    }
}

TEST(Recipe, D6_NoWholeNumberOfStepsIsRefusedWithChoices) {
  int64_t tokens = 1024 * 4096;
  // Less than one step.
  expect_refusal(
      [&] { accumulation_steps(tokens, 4096, 2, 1024); },
      {"make 0.5 accumulation steps", "micro-batches of 1", "512 GPUs", "8388608 tokens"});
  expect_refusal([&] { accumulation_steps(tokens, 4096, 1, 2048); }, {"0.5", "use 1024 GPUs, or"});
  // Between two numbers of steps.
  expect_refusal([&] { accumulation_steps(tokens, 4096, 3, 128); },
                 {"2.66667", "micro-batches of 2", "a global batch of 3145728 or 4718592 tokens"});
  expect_refusal([&] { accumulation_steps(tokens, 4096, 2, 96); }, {"5.33333", "64 or 128 GPUs"});
  expect_refusal([&] { accumulation_steps(tokens, 4096, 5, 96); },
                 {"use a global batch of 3932160 or 5898240 tokens"});
  expect_refusal([&] { sequences_in(5000, 4096); }, {"5000", "use 4096 or 8192"});
  // What is advised works.
  EXPECT_EQ(accumulation_steps(tokens, 4096, 1, 1024), 1);
  EXPECT_EQ(accumulation_steps(tokens, 4096, 2, 64), 8);
  EXPECT_EQ(accumulation_steps(5898240, 4096, 5, 96), 3);
}

TEST(Recipe, ExposedTimeByHand) {
  // Four buckets, ready at 1, 2, 3, 4; each needs 0.5, then 1, then 2.
  EXPECT_DOUBLE_EQ(exposed_time(4, 4, 0.5), 0.5);  // the last one alone
  EXPECT_DOUBLE_EQ(exposed_time(4, 4, 1), 1);
  EXPECT_DOUBLE_EQ(exposed_time(4, 4, 2), 5);  // 1 + 4 x 2, less 4
  EXPECT_EQ(exposed_time(4, 4, 0), 0);
  for (double each : {0.1, 0.7, 1.3}) {  // one bucket after the other
    double network_free = 0;
    for (int b = 1; b <= 7; ++b) network_free = std::max(network_free, 5 * (b / 7.0)) + each;
    EXPECT_NEAR(exposed_time(5, 7, each), network_free - 5, 1e-12);
  }
  RingTime ring = ring_all_reduce_time(1000, 4, 100, 0.25);
  EXPECT_DOUBLE_EQ(ring.moving, 2 * 3 * 250 / 100.);
  EXPECT_DOUBLE_EQ(ring.waiting, 6 * 0.25);
  EXPECT_EQ(ring_all_reduce_time(1000, 1, 100, 0.25).total(), 0);
}

// The program, as a newcomer starts it.
Output recipe(const std::string& flags) {
  return shell(LOCKSTEP_BINARY_DIR "/02_data_parallel/recipe " + flags);
}

TEST(Recipe, D6_ProgramGoesThroughTheSteps) {
  Output out = recipe("--gpus 128");
  EXPECT_EQ(out.status, 0) << out.out;
  EXPECT_TRUE(out.says("4194304 tokens = 1024 sequences of 4096")) << out.out;
  EXPECT_TRUE(out.says("6 take 77.16 GiB, 7 would take 85.52 GiB")) << out.out;
  EXPECT_TRUE(out.says("a GPU gets 8 sequences, no multiple of 6: take 4")) << out.out;
  EXPECT_TRUE(out.says("1024 / (4 x 128 GPUs) = 2 micro-batches a step")) << out.out;
  EXPECT_TRUE(recipe("--gpus 128 --micro-batch 2").says("= 4 micro-batches a step"));
  EXPECT_TRUE(recipe("--gpus 512 --micro-batch 2").says("= 1 micro-batch a step"));
  Output rich = recipe("--gpus 1024 --micro-batch 2");
  EXPECT_EQ(rich.status, 1);
  EXPECT_TRUE(rich.says("make 0.5 accumulation steps")) << rich.out;
  Output small = recipe("--gpu-memory-gib 24");
  EXPECT_EQ(small.status, 1);
  EXPECT_TRUE(small.says("one sequence of 4096 tokens takes 35.36 GiB")) << small.out;
  EXPECT_TRUE(recipe("--micro-batch 7").says("--micro-batch 7 does not fit: at most 6"));
}

// Beyond the ranks at hand: a simulated step of the 1.7B shape on H100s.
TEST(Recipe, D7_SpeedFallsWithRanksAndMemoryStaysFlat) {
  TemporaryFolder dir;
  std::string csv = dir / "s.csv", svg = dir / "s.svg";
  Output out = recipe("--csv " + csv + " --svg " + svg);
  ASSERT_EQ(out.status, 0) << out.out;
  std::istringstream lines(content_of(csv));
  std::string line;
  std::getline(lines, line);
  EXPECT_EQ(line,
            "gpus,compute_s,ring_bytes_s,ring_latency_s,hidden_s,exposed_s,tokens_per_s_per_gpu,"
            "efficiency,memory_bytes");
  std::map<int, std::vector<double>> rows;  // by the number of GPUs: the other cells
  double before = INFINITY;
  while (std::getline(lines, line)) {
    std::istringstream cells(line);
    std::vector<double> x;
    for (std::string cell; std::getline(cells, cell, ',');) x.push_back(std::stod(cell));
    ASSERT_EQ(x.size(), 9u) << line;
    EXPECT_LT(x[6], before) << line;  // tokens/s of a GPU
    before = x[6];
    EXPECT_NEAR(x[6], 4 * 4096 / (x[1] + x[5]), 1e-3 * x[6]) << line;
    EXPECT_NEAR(x[4] + x[5], x[2] + x[3], 1e-5 * (1 + x[2])) << line;
    rows[int(x[0])] = x;
  }
  ASSERT_EQ(rows.size(), 11u);
  for (auto& [gpus, x] : rows) EXPECT_EQ(x[8], rows[1][8]) << gpus;
  EXPECT_EQ(rows[1][7], 1);
  EXPECT_GT(rows[256][7], 0.99);  // hidden up to there
  EXPECT_LT(rows[512][7], 0.95);
  EXPECT_LT(rows[1024][7], 0.7);
  // Bytes do not explain it: their time hardly grows. Latency does.
  EXPECT_LT(rows[1024][2], 1.01 * rows[128][2]);
  EXPECT_LT(rows[128][3], rows[128][2]);
  EXPECT_GT(rows[512][3], 2 * rows[512][2]);
  EXPECT_NE(content_of(svg).find(">1024</text>"), std::string::npos);  // below the axis
}

}  // namespace
}  // namespace lockstep
