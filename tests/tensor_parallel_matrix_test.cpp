// Tensor parallelism in every form gives the training of one rank: all combinations.
// tensor_parallel_layout_test.cpp has a selection of them for every day.

#include "tests/tensor_parallel_cases.h"

namespace lockstep {
namespace {

class TensorParallelMatrix : public ::testing::TestWithParam<size_t> {};

TEST_P(TensorParallelMatrix, IsOneRankAfterFiveSteps) {
  TensorModel model = model_number(GetParam());
  Trained one = one_rank(model, 5);
  for (int tp : kTP)
    for (int dp : kDP)
      for (const Variant& variant : kVariants)
        for (Sync sync : kTensorSyncs) expect_one_rank({tp, dp, variant, sync, model}, one, 5);
}

INSTANTIATE_TEST_SUITE_P(All, TensorParallelMatrix, ::testing::Range(size_t(0), kModels),
                         [](const auto& info) { return model_number(info.param).name(); });

}  // namespace
}  // namespace lockstep
