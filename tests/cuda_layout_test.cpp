// Ranks as threads that share one GPU, in every way to hold and sum gradients, against one rank on
// it.

#include "tests/layout_cases.h"

namespace lockstep {
namespace {

LayoutRig::Settings settings(DType compute, Sync sync) {
  LayoutRig::Settings s = settings_of({1, sync, 1, Recompute::Full, true});
  s.device = Device::CUDA;
  s.compute = compute;
  return s;
}

// One instance per type where there is a GPU, none elsewhere.
class CudaLayout : public ::testing::TestWithParam<DType> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CudaLayout);
INSTANTIATE_TEST_SUITE_P(Cuda, CudaLayout,
                         ::testing::ValuesIn(device::available()
                                                 ? std::vector<DType>{DType::F32, DType::BF16}
                                                 : std::vector<DType>{}),
                         [](const auto& info) { return std::string(name_of(info.param)); });

// Sums add in rank order here too, but a product may take another kernel where its weights begin at
// another multiple of bytes in their bucket: not the same bits.
TEST_P(CudaLayout, EveryStrategyIsOneRank) {
  bool exact = GetParam() == DType::F32;
  int steps = exact ? 10 : 1;  // in bf16 AdamW turns rounding into steps (layout_test.cpp)
  Tolerance tolerance{.loss = 1e-5, .gradient = 1e-5, .weight = 1e-5};
  if (!exact) tolerance = {.loss = 2e-2, .gradient = 2e-2, .weight = 2e-2};
  Trained one = train(1, settings(GetParam(), Sync::Naive), 1, steps);
  for (DType gradients : {DType::F32, DType::BF16}) {
    if (exact && gradients == DType::BF16) continue;
    for (int ranks : {2, 4})
      for (Sync sync : kAllSyncs)
        for (int accumulation : kAccumulations) {
          SCOPED_TRACE(text(name_of(gradients), " gradients, DP", ranks, " ", name_of(sync),
                            ", accumulation ", accumulation));
          LayoutRig::Settings s = settings(GetParam(), sync);
          s.parallel.gradients = gradients;
          Trained many = train(ranks, s, accumulation, steps, {.time_limit = 20});
          expect_same(many, one, tolerance);
          EXPECT_EQ(strict_order(many.ledgers), "");
        }
  }
}

TEST_P(CudaLayout, RepeatedRunsGiveTheSameBits) {
  for (Sync sync : kAllSyncs) {
    Trained first = train(3, settings(GetParam(), sync), 2, 3);
    Trained again = train(3, settings(GetParam(), sync), 2, 3);
    EXPECT_EQ(again.losses, first.losses) << name_of(sync);
    expect_bitwise(again.weights, first.weights);
  }
}

// Fresh memory is NaN, padding of shards included. Memory that another stream still reads must not
// be given out again: where that happens, NaN comes in.
TEST_P(CudaLayout, PoisonedMemoryChangesNothing) {
  for (Sync sync : kAllSyncs) {
    Trained clean = train(3, settings(GetParam(), sync), 2, 3);
    memory_account()->poison = true;
    Trained poisoned = train(3, settings(GetParam(), sync), 2, 3);
    memory_account()->poison = false;
    EXPECT_EQ(poisoned.losses, clean.losses) << name_of(sync);
    EXPECT_EQ(poisoned.norms, clean.norms) << name_of(sync);
    expect_bitwise(poisoned.weights, clean.weights);
  }
}

}  // namespace
}  // namespace lockstep
