// Ranks as threads that share one GPU and every matrix, against one rank on it.

#include "tests/tensor_parallel_cases.h"

namespace lockstep {
namespace {

// One instance per type where there is a GPU, none elsewhere.
class CudaTensorParallel : public ::testing::TestWithParam<DType> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CudaTensorParallel);
INSTANTIATE_TEST_SUITE_P(Cuda, CudaTensorParallel,
                         ::testing::ValuesIn(device::available()
                                                 ? std::vector<DType>{DType::F32, DType::BF16}
                                                 : std::vector<DType>{}),
                         [](const auto& info) { return std::string(name_of(info.param)); });

LayoutRig::Settings settings(const TensorCase& c, DType compute) {
  LayoutRig::Settings s = settings_of(c);
  s.device = Device::CUDA;
  s.compute = compute;
  return s;
}

TEST_P(CudaTensorParallel, EveryVariantIsOneRank) {
  bool exact = GetParam() == DType::F32;
  int steps = exact ? 3 : 1;  // in bf16 AdamW turns rounding into steps
  Tolerance tolerance{.loss = 1e-5, .gradient = 1e-5, .weight = 1e-5};
  // Both runs are rounded to bf16, each within 2e-2 of the exact gradient. Biases begin at zero, so
  // AdamW's first step makes a whole weight of the sign of a gradient: they are not compared.
  if (!exact) tolerance = {.loss = 2e-2, .gradient = 4e-2, .weight = INFINITY};
  for (size_t number : {6, 13}) {  // tied with biases; grouped heads with biases and dropout
    TensorModel model = model_number(number);
    LayoutRig::Settings alone = settings({1, 1, kVariants[0], Sync::Naive, model}, GetParam());
    alone.tensor_parallel.reset();
    Trained one = train(1, alone, 1, steps);
    for (const Variant& variant : kVariants)
      for (MeshShape shape :
           {MeshShape{.tp = 2}, MeshShape{.tp = 4}, MeshShape{.dp = 2, .tp = 2}}) {
        Sync sync = shape.dp > 1 ? Sync::Zero3 : Sync::Bucketed;
        TensorCase c{shape.tp, shape.dp, variant, sync, model};
        SCOPED_TRACE(c.name());
        Trained many = train(shape, settings(c, GetParam()), 2, steps, {.time_limit = 20});
        expect_bitwise(many.start, one.start);
        expect_same(many, one, tolerance);
        EXPECT_EQ(strict_order(many.ledgers), "");
      }
  }
}

// Memory that another stream still reads must not be given out again: where that happens, NaN
// comes in.
TEST_P(CudaTensorParallel, PoisonedMemoryChangesNothing) {
  for (const Variant& variant : kVariants) {
    TensorCase c{2, 2, variant, Sync::Zero3, {.kv_heads = 2, .tied = true, .biases = true}};
    Trained clean = train(c.shape(), settings(c, GetParam()), 2, 3);
    memory_account()->poison = true;
    Trained poisoned = train(c.shape(), settings(c, GetParam()), 2, 3);
    memory_account()->poison = false;
    EXPECT_EQ(poisoned.losses, clean.losses) << variant.name;
    expect_bitwise(poisoned.weights, clean.weights);
  }
}

}  // namespace
}  // namespace lockstep
