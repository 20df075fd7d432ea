// Operations, MFU and HFU against numbers worked out by hand, and peaks by name.

#include "common/flops.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "common/report.h"
#include "tests/temporary.h"

namespace lockstep {
namespace {

// N = 2 tables x 10 x 4 + 2 blocks x (4 x 4² + 3 x 4 x 6 + 2 x 4) + 4 = 80 + 2 x 144 + 4 = 372.
ModelConfig by_hand() {
  ModelConfig c;
  c.layers = 2;
  c.hidden = 4;
  c.heads = c.kv_heads = 2;
  c.head_dim = 2;
  c.ffn = 6;
  c.vocab = 10;
  return c;
}

TEST(Flops, S11_OperationsPerTokenByHand) {
  ModelConfig c = by_hand();
  ASSERT_EQ(c.parameters(), 372);
  // L h s = 2 x 4 x 8 = 64: 6 x 372 + 12 x 64 = 2232 + 768.
  EXPECT_EQ(model_flops_per_token(c, 8), 3000);
  EXPECT_EQ(hardware_flops_per_token(c, 8, Recompute::None), 3000);
  EXPECT_EQ(hardware_flops_per_token(c, 8, Recompute::Selective), 3000 + 4 * 64);
  // The blocks alone are computed again: 2 x 288 weights, and attention.
  EXPECT_EQ(hardware_flops_per_token(c, 8, Recompute::Full), 3000 + 2 * 288 + 4 * 64);
  c.tied = true;  // one table less in N, none in the blocks
  EXPECT_EQ(hardware_flops_per_token(c, 8, Recompute::Full), 3000 - 6 * 40 + 2 * 288 + 4 * 64);
}

TEST(Flops, S11_RecomputationRaisesHfuAndNotMfu) {
  // 3000 operations a token at 10^9 tokens/s on a device of 312 x 10^12.
  auto at = [](Recompute recompute) {
    return Efficiency(by_hand(), 8, recompute, DType::BF16, "NVIDIA A100-SXM4-80GB").at(1e9);
  };
  Utilisation none = at(Recompute::None), selective = at(Recompute::Selective);
  Utilisation full = at(Recompute::Full);
  EXPECT_DOUBLE_EQ(*none.mfu, 3000e9 / 312e12);
  EXPECT_EQ(*selective.mfu, *none.mfu);
  EXPECT_EQ(*full.mfu, *none.mfu);
  EXPECT_EQ(*none.hfu, *none.mfu);
  EXPECT_DOUBLE_EQ(*selective.hfu, 3256e9 / 312e12);
  EXPECT_DOUBLE_EQ(*full.hfu, 3832e9 / 312e12);
}

// Of a large model with short sequences nearly all is in the blocks: a forward more makes 4/3.
TEST(Flops, S11_FullRecomputationCostsAThirdOfALargeModel) {
  ModelConfig c;
  c.layers = 96;
  c.hidden = 12288;
  c.heads = c.kv_heads = 96;
  c.head_dim = 128;
  c.ffn = 4 * 12288;
  c.vocab = 50257;
  double ratio =
      hardware_flops_per_token(c, 2048, Recompute::Full) / model_flops_per_token(c, 2048);
  EXPECT_NEAR(ratio, 4.0 / 3, 0.003);
}

TEST(Flops, Pitfall11_PeakIsTheOneOfTheDevice) {
  EXPECT_EQ(*peak_flops("NVIDIA A100-SXM4-80GB", DType::BF16), 312e12);
  EXPECT_EQ(*peak_flops("NVIDIA A100 80GB PCIe", DType::BF16), 312e12);
  EXPECT_EQ(*peak_flops("NVIDIA H100 80GB HBM3", DType::BF16), 989.5e12);
  EXPECT_EQ(*peak_flops("NVIDIA H200", DType::BF16), 989.5e12);
  EXPECT_EQ(*peak_flops("NVIDIA GH200 480GB", DType::BF16), 989.5e12);
  EXPECT_EQ(*peak_flops("NVIDIA H100 PCIe", DType::BF16), 756.5e12);
  EXPECT_EQ(*peak_flops("NVIDIA H100 NVL", DType::BF16), 835.5e12);
  EXPECT_EQ(*peak_flops("NVIDIA GeForce RTX 3090", DType::BF16), 71e12);
  EXPECT_EQ(*peak_flops("NVIDIA L4", DType::BF16), 121e12);
  EXPECT_EQ(*peak_flops("NVIDIA L40S", DType::BF16), 362.05e12);
  EXPECT_EQ(*peak_flops("NVIDIA A100-SXM4-40GB", DType::F32), 19.5e12);
  EXPECT_EQ(*peaks_of("NVIDIA A100-SXM4-40GB").fp16, 312e12);

  // The same speed measured against the wrong peak would be 3.17 times too low.
  auto mfu = [](const char* name) {
    return *Efficiency(by_hand(), 8, Recompute::None, DType::BF16, name).at(1e9).mfu;
  };
  EXPECT_NEAR(mfu("NVIDIA A100-SXM4-80GB") / mfu("NVIDIA H100 80GB HBM3"), 3.17, 0.005);
}

TEST(Flops, Pitfall11_UnknownIsNoNumber) {
  for (const char* name :
       {"CPU", "", "NVIDIA", "NVIDIA H100", "NVIDIA A1000", "NVIDIA A100X", "NVIDIA L40G",
        "NVIDIA H100 80GB HBM3 MIG 1g.10gb", "NVIDIA A100-SXM4-40GB MIG 1g.5gb",
        "NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA GeForce RTX 4090 D", "NVIDIA A100-SXM-64GB",
        "NVIDIA H200 MIG 1g.18gb", "NVIDIA GH200 480GB MIG 1g.12gb", "AMD Instinct MI300X"}) {
    EXPECT_FALSE(peak_flops(name, DType::BF16)) << name;
    EXPECT_FALSE(peak_flops(name, DType::F32)) << name;
  }
  EXPECT_FALSE(peak_flops("Tesla V100-SXM2-16GB", DType::BF16));  // it has none
  EXPECT_EQ(*peaks_of("Tesla V100-SXM2-16GB").fp16, 125e12);
  EXPECT_EQ(*peak_flops("Tesla V100-SXM2-16GB", DType::F32), 15.7e12);
  EXPECT_FALSE(peak_flops("Tesla T4", DType::BF16));
  EXPECT_FALSE(peak_flops("NVIDIA A100-SXM4-80GB", DType::F64));
}

TEST(Flops, Pitfall11_LineSaysNotAvailableAndWhy) {
  Efficiency a100(by_hand(), 8, Recompute::Full, DType::BF16, "NVIDIA A100-SXM4-80GB");
  EXPECT_EQ(a100.line(26e9), "speed   26000000000 tokens/s, MFU 25.0 %, HFU 31.9 %");
  EXPECT_EQ(a100.line(0), "speed   n/a tokens/s, MFU n/a, HFU n/a");
  EXPECT_EQ(a100.warning(), "");
  Efficiency cpu(by_hand(), 8, Recompute::Full, DType::F32, "CPU");
  EXPECT_EQ(cpu.line(1234), "speed   1234 tokens/s, MFU n/a, HFU n/a");
  EXPECT_NE(cpu.warning().find("CPU"), std::string::npos);
  EXPECT_NE(cpu.warning().find("F32"), std::string::npos);
}

// A whole run on the CPU: n/a and null, never a number, and one warning.
TEST(Flops, Pitfall11_ARunOnTheCpuWarnsOnce) {
  TemporaryFolder dir;
  Options options;
  options.config = by_hand();
  options.sequence = 8;
  options.log = dir / "log.jsonl";
  Tensor state = Tensor::zeros({sizeof(StepState)}, DType::U8, Device::CPU);
  ::testing::internal::CaptureStdout();
  ::testing::internal::CaptureStderr();
  {
    Report report(options, 4);
    for (int64_t step = 1; step <= 4; ++step) report.step(step, state, 8);
    report.finish();
    report.summary();
    EXPECT_GT(report.tokens_per_second(), 0);
  }
  std::string warnings = ::testing::internal::GetCapturedStderr();
  std::string out = ::testing::internal::GetCapturedStdout();
  EXPECT_EQ(std::count(warnings.begin(), warnings.end(), '\n'), 1) << warnings;
  EXPECT_EQ(warnings.rfind("warning: ", 0), 0u) << warnings;
  EXPECT_NE(out.find("tokens/s, MFU n/a, HFU n/a\n"), std::string::npos) << out;
  std::ifstream log(options.log);
  int lines = 0;
  for (std::string line; std::getline(log, line); ++lines) {
    nlohmann::json j = nlohmann::json::parse(line);
    EXPECT_TRUE(j.at("mfu").is_null()) << line;
    EXPECT_TRUE(j.at("hfu").is_null()) << line;
  }
  EXPECT_EQ(lines, 4);
}

// Speed is that of training: a step behind an evaluation or a checkpoint is not timed.
TEST(Flops, SpeedLeavesOutWhatIsNotTraining) {
  TemporaryFolder dir;
  Options options;
  options.config = by_hand();
  Tensor state = Tensor::zeros({sizeof(StepState)}, DType::U8, Device::CPU);
  auto sleep = [](int ms) { std::this_thread::sleep_for(std::chrono::milliseconds(ms)); };
  ::testing::internal::CaptureStdout();
  Report report(options, 8);
  for (int64_t step = 1; step <= 8; ++step) {
    sleep(5);  // the step
    report.step(step, state, 100);
    if (step == 4) {
      sleep(200);
      report.validation(step, 1);
    }
    if (step == 6) {
      report.finish();
      sleep(200);
    }
  }
  ::testing::internal::GetCapturedStdout();
  EXPECT_LE(report.tokens_per_second(), 100 / 5e-3);
  EXPECT_GE(report.tokens_per_second(), 100 / 50e-3);
}

}  // namespace
}  // namespace lockstep
