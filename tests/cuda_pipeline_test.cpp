// Pipelines whose ranks are threads that share one GPU, against one rank on it.

#include "tests/pipeline_cases.h"

namespace lockstep {
namespace {

LayoutRig::Settings settings(DType compute, bool tied) {
  LayoutRig::Settings s = pipeline_settings(tied);
  s.device = Device::CUDA;
  s.compute = compute;
  return s;
}

// One instance per type where there is a GPU, none elsewhere.
class CudaPipeline : public ::testing::TestWithParam<DType> {
 protected:
  bool exact() const { return GetParam() == DType::F32; }
  // In bf16 a run's first step is compared (layout_test.cpp).
  int steps() const { return exact() ? 10 : 1; }
  Tolerance tolerance() const {
    if (exact()) return {.loss = 1e-5, .gradient = 1e-5, .weight = 1e-5};
    return {.loss = 2e-2, .gradient = 2e-2, .weight = 2e-2};
  }
};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CudaPipeline);
INSTANTIATE_TEST_SUITE_P(Cuda, CudaPipeline,
                         ::testing::ValuesIn(device::available()
                                                 ? std::vector<DType>{DType::F32, DType::BF16}
                                                 : std::vector<DType>{}),
                         [](const auto& info) { return std::string(name_of(info.param)); });

const std::vector<std::string> kSchedules{"1f1b", "zb-h1", "zb-v"};

TEST_P(CudaPipeline, EveryScheduleIsOneRank) {
  for (bool tied : {false, true}) {
    Trained one = train_plain(1, 4, settings(GetParam(), tied), steps());
    for (int pp : {2, 4})
      for (const std::string& schedule : kSchedules)
        for (int dp : {1, 2}) {
          PipelineCase c{schedule, pp, 4, dp, dp == 1 ? Sync::Bucketed : Sync::Zero1};
          SCOPED_TRACE(c.name());
          Trained run = train_pipeline(c, settings(GetParam(), tied), steps());
          expect_same(run, one, tolerance());
          EXPECT_EQ(strict_order(run.ledgers), "");
        }
  }
}

TEST_P(CudaPipeline, RepeatedRunsGiveTheSameBits) {
  for (const std::string& schedule : kSchedules) {
    PipelineCase c{schedule, 4, 8};
    Trained first = train_pipeline(c, settings(GetParam(), true), 3);
    Trained again = train_pipeline(c, settings(GetParam(), true), 3);
    EXPECT_EQ(again.losses, first.losses) << schedule;
    expect_bitwise(again.weights, first.weights);
  }
}

// Fresh memory is NaN. What a stage has received lies in memory that another rank's stream wrote:
// used too early, or given out again too early, NaN comes in.
TEST_P(CudaPipeline, PoisonedMemoryChangesNothing) {
  for (const std::string& schedule : kSchedules) {
    PipelineCase c{schedule, 4, 8};
    Trained clean = train_pipeline(c, settings(GetParam(), false), 2);
    memory_account()->poison = true;
    Trained poisoned = train_pipeline(c, settings(GetParam(), false), 2);
    memory_account()->poison = false;
    EXPECT_EQ(poisoned.losses, clean.losses) << schedule;
    expect_bitwise(poisoned.weights, clean.weights);
  }
}

}  // namespace
}  // namespace lockstep
