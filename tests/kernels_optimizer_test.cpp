// The kernels of an optimizer step, of which the host sees nothing until it is over.

#include <cstring>

#include "tests/kernels_testing.h"

namespace lockstep {
namespace {

class OptimizerKernels : public KernelTest {};
INSTANTIATE_TEST_SUITE_P(Devices, OptimizerKernels, testing::ValuesIn(all_cases()), name_of_case);

TEST_P(OptimizerKernels, SumOfSquaresOfEach) {
  std::vector<Tensor> all;
  Doubles expected;
  auto add = [&](const Tensor& x) {
    all.push_back(x);
    expected.push_back(0);
    if (x.defined())
      for (double v : read(x)) expected.back() += v * v;
  };
  for (int64_t n : {0, 1, 3, 256, 4097, 16384, 16385, 300000}) add(random({n}));
  add(Tensor());
  add(random({33}, sums()));                           // types may differ
  for (int64_t n = 0; n < 150; ++n) add(random({n}));  // more than one launch takes
  Tensor each = output({int64_t(all.size())}, DType::F64);
  run().sum_squares(each, all);
  Doubles got = read(each);
  for (size_t i = 0; i < all.size(); ++i)
    EXPECT_NEAR(got[i], expected[i], 1e-12 * expected[i]) << "tensor " << i;

  Tensor one = output({1}, DType::F64);
  run().sum_squares(one, {with({2}, {0x1p100, 0x1p100})});  // its square is beyond fp32
  expect_close(one, {0x1p201}, 1e-12);
}

StepState state_in(const Tensor& t) {
  StepState s;
  std::memcpy(&s, bytes_of(t).data(), sizeof s);
  return s;
}

TEST_P(OptimizerKernels, AdamWStepsThatTheHostDoesNotSee) {
  UpdateRule rule;
  rule.schedule.peak = 0.1;
  for (int64_t n : {0, 1, 8, 33, 1028})
    for (DType grad_type : gradient_types()) {
      Tensor state = integers(std::vector<uint8_t>(sizeof(StepState), 0));
      Tensor scale = output({1}, sums()), squares = output({2}, DType::F64);
      Tensor master = random({n}, sums()), m = random({n}, sums(), 0.1);
      Tensor v = with({n}, Doubles(size_t(n), 0.5), sums());
      Tensor value = type() == sums() ? master : output({n});
      Doubles w = read(master), pm = read(m), pv = read(v);
      for (int step = 1; step <= 3; ++step) {
        Tensor grad = random({n}, grad_type);
        // The second step has no valid token: nothing may change.
        run().begin_step(state, scale, integers(std::vector<int64_t>{step == 2 ? 0 : 4}));
        EXPECT_EQ(read(scale), Doubles{step == 2 ? 0 : 0.25});
        run().add_loss(state, with({1}, {1.5}, sums()));
        run().add_loss(state, with({1}, {0.25}, sums()));
        run().sum_squares(squares, {grad, with({1}, {3})});
        Tensor sums_of_all = output({2}, DType::F64);
        run().local_sums(sums_of_all, state, squares);
        run().begin_update(state, sums_of_all, rule);
        run().adamw(value, master, m, v, grad, state, rule, true);

        StepState s = state_in(state);
        Doubles g = read(grad);
        double norm = 9;
        for (double x : g) norm += x * x;
        EXPECT_EQ(s.loss, 1.75);
        EXPECT_NEAR(s.gradient_norm, std::sqrt(norm), 1e-9 * std::sqrt(norm));
        EXPECT_EQ(s.updates, step == 1 ? 1 : step - 1);
        EXPECT_EQ(s.skip != 0, step == 2);
        if (step == 2) continue;
        for (int64_t i = 0; i < n; ++i)
          adamw_element<double>(w[i], pm[i], pv[i], g[i], rule.weight_decay, s, rule);
      }
      double bound = sums() == DType::F64 ? 1e-12 : 2e-6;
      expect_close(master, w, bound, "master");
      expect_close(m, pm, bound, "m");
      expect_close(v, pv, bound, "v");
      expect_close(value, w, tolerance(), "value");
    }
}

TEST_P(OptimizerKernels, AGradientThatIsNotFiniteStopsEverything) {
  Tensor state = integers(std::vector<uint8_t>(sizeof(StepState), 0));
  Tensor w = random({33}, sums()), m = random({33}, sums()), v = random({33}, sums());
  Tensor squares = output({1}, DType::F64), scale = output({1}, sums());
  Doubles before = read(w);
  for (double g : {double(NAN), 1.0}) {  // and it stays stopped
    Tensor grad = with({33}, Doubles(33, g));
    run().begin_step(state, scale, integers(std::vector<int64_t>{1}));
    run().sum_squares(squares, {grad});
    Tensor sums_of_all = output({2}, DType::F64);
    run().local_sums(sums_of_all, state, squares);
    run().begin_update(state, sums_of_all, {});
    run().adamw(w, w, m, v, grad, state, {}, true);
    EXPECT_EQ(state_in(state).stopped, 1);
    EXPECT_EQ(read(w), before);
  }
}

}  // namespace
}  // namespace lockstep
