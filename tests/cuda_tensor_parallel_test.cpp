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

// Rounded to bf16, two runs differ by what each rounded; a sum cut over four ranks is rounded four
// times before it is added. So both are held against the exact gradients: the cut run may be twice
// as far from them as the whole one. (On a CPU at most 2.2 times; a missing sum is off by 100 %.)
void expect_as_precise(const Trained& many, const Trained& one, const Trained& exact) {
  for (const auto& [name, g] : exact.gradients) {
    double allowed = 2 * relative_error(one.gradients.at(name), g) + 1e-2;
    EXPECT_LE(relative_error(many.gradients.at(name), g), allowed) << "gradient of " << name;
  }
  EXPECT_NEAR(many.losses[0], exact.losses[0], 2e-2 * exact.losses[0]);
}

TEST_P(CudaTensorParallel, EveryVariantIsOneRank) {
  bool exactly = GetParam() == DType::F32;
  int steps = exactly ? 3 : 1;     // in bf16 AdamW turns rounding into steps
  for (size_t number : {6, 13}) {  // tied with biases; grouped heads with biases and dropout
    TensorModel model = model_number(number);
    auto alone = [&](DType compute) {
      LayoutRig::Settings s = settings({1, 1, kVariants[0], Sync::Naive, model}, compute);
      s.tensor_parallel.reset();
      return train(1, s, 1, steps);
    };
    Trained one = alone(GetParam()), exact = alone(DType::F32);
    for (const Variant& variant : kVariants)
      for (MeshShape shape :
           {MeshShape{.tp = 2}, MeshShape{.tp = 4}, MeshShape{.dp = 2, .tp = 2}}) {
        Sync sync = shape.dp > 1 ? Sync::Zero3 : Sync::Bucketed;
        TensorCase c{shape.tp, shape.dp, variant, sync, model};
        SCOPED_TRACE(c.name());
        Trained many = train(shape, settings(c, GetParam()), 2, steps, {.time_limit = 20});
        expect_bitwise(many.start, one.start);
        if (exactly)
          expect_same(many, one, {.loss = 1e-5, .gradient = 1e-5, .weight = 1e-5});
        else
          expect_as_precise(many, one, exact);
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
