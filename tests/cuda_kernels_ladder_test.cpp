// Chapter 08 on a GPU: every rung of the fp32 ladder and every plain kernel against sums in double
// precision, and the lessons that show in times. Without a GPU there is nothing to run.

#include <chrono>

#include "08_kernels/basics.h"
#include "08_kernels/plain.h"
#include "08_kernels/sgemm.h"
#include "common/device_cuda.h"
#include "tests/kernels_testing.h"

namespace lockstep {
namespace {

std::vector<Case> gpu_cases() {
  std::vector<Case> cases = all_cases();
  std::erase_if(cases, [](const Case& c) { return c.device == Device::CPU; });
  return cases;
}
class PlainKernels : public KernelTest {
 protected:
  Kernels& cpu() const { return kernels(Device::CPU); }
  // The reference: the CPU's kernels in double, which have tests of their own.
  Tensor wide(const Tensor& t) const { return t.defined() ? converted(t, DType::F64) : t; }
  Tensor result(const Tensor& like) const {
    return Tensor::empty(like.shape(), DType::F64, Device::CPU);
  }
  void expect_equal(const Tensor& got, const Tensor& reference, const std::string& what) {
    expect_close(got, reference.values<double>(), tolerance(2e-2), what);
  }
};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(PlainKernels);
INSTANTIATE_TEST_SUITE_P(Devices, PlainKernels, testing::ValuesIn(gpu_cases()), name_of_case);

const std::vector<int64_t> kWidths = {1, 33, 257, 1600};

TEST_P(PlainKernels, RmsNormForwardAndBackward) {
  for (int64_t width : kWidths)
    for (bool adds : {false, true}) {
      const Shape all = {3, width};
      Tensor x = random(all), gain = random({width}), delta = adds ? random(all) : Tensor();
      Tensor sum = adds ? output(all) : Tensor(), y = output(all), rstd = output({3}, sums());
      plain::rmsnorm(y, rstd, x, delta, sum, gain, 1e-5f);
      Tensor y64 = result(y), rstd64 = result(rstd), sum64 = adds ? result(sum) : Tensor();
      cpu().rmsnorm(y64, rstd64, wide(x), wide(delta), sum64, wide(gain), 1e-5f);
      expect_equal(y, y64, text("y, width ", width));
      expect_equal(rstd, rstd64, text("rstd, width ", width));
      if (adds) expect_equal(sum, sum64, text("sum, width ", width));

      Tensor dx = output(all), dy = random(all), r = with({3}, {0.5, 1.25, 2}, sums());
      plain::rmsnorm_backward(dx, dy, delta, x, r, gain);
      Tensor dx64 = result(dx);
      cpu().rmsnorm_backward(dx64, wide(dy), wide(delta), wide(x), wide(r), wide(gain));
      expect_equal(dx, dx64, text("dx, width ", width));
    }
}

TEST_P(PlainKernels, SwiGluRopeAndCrossEntropy) {
  for (int64_t width : kWidths) {
    Tensor gate_up = random({3, 2 * width}), out = output({3, width}), out64 = result(out);
    plain::swiglu(out, gate_up);
    cpu().swiglu(out64, wide(gate_up));
    expect_equal(out, out64, text("SwiGLU, width ", width));

    Tensor logits = random({4, width}), loss = output({1}, sums()), lse = output({4}, sums());
    Tensor targets = integers(std::vector<int32_t>{0, int32_t(width - 1), -1, int32_t(width / 2)});
    Tensor scale = with({1}, {0.25}, sums()), loss64 = result(loss), lse64 = result(lse);
    plain::cross_entropy(loss, lse, logits, targets, scale);
    cpu().cross_entropy(loss64, lse64, wide(logits), targets.to(Device::CPU), wide(scale));
    expect_close(loss, loss64.values<double>(), tolerance(2e-2), text("loss of ", width), 1);
    expect_close(lse, lse64.values<double>(), tolerance(2e-2), text("lse of ", width), 1);
  }
  AttentionShape s{1, 5, 4, 2, 6};
  Tensor qkv = random({5, s.columns()}), turned = output({5, s.columns()}), turned64 = result(qkv);
  Tensor positions = integers(std::vector<int32_t>{0, 1, 7, 100, 2000});
  Tensor inv_freq = with({3}, {1, 0.1, 0.01}, sums());
  plain::rope(turned, qkv, positions, inv_freq, s);
  cpu().rope(turned64, wide(qkv), positions.to(Device::CPU), wide(inv_freq), s, false);
  expect_close(turned, turned64.values<double>(), tolerance(2e-2), "RoPE");
}

TEST_P(PlainKernels, AdamWAndSquares) {
  for (int64_t n : {1, 33, 4097}) {
    StepState state;
    state.clip = 0.5f, state.learning_rate = 0.1f, state.bias1 = 0.1f, state.bias2 = 0.05f;
    const auto* bytes = reinterpret_cast<const uint8_t*>(&state);
    Tensor s = integers(std::vector<uint8_t>(bytes, bytes + sizeof state));
    Tensor master = random({n}, DType::F32), m = random({n}, DType::F32, 0.1);
    Tensor v = with({n}, Doubles(size_t(n), 0.5), DType::F32), grad = random({n});
    Tensor value = type() == DType::F32 ? master : output({n});
    Tensor w64 = wide(master), m64 = wide(m), v64 = wide(v);
    plain::adamw(value, master, m, v, grad, s, {}, true);
    cpu().adamw(w64, w64, m64, v64, wide(grad), s.to(Device::CPU), {}, true);
    expect_close(master, w64.values<double>(), 1e-5, "master");
    expect_close(m, m64.values<double>(), 1e-5, "m");
    expect_close(v, v64.values<double>(), 1e-5, "v");
    expect_close(value, w64.values<double>(), tolerance(), "value");

    Tensor sum = output({1}, DType::F64), sum64 = result(sum);
    plain::sum_squares(sum, grad);
    cpu().sum_squares(sum64, {wide(grad)});
    expect_close(sum, sum64.values<double>(), 1e-6, "squares");
  }
}

class GpuLadder : public testing::Test {
 protected:
  void SetUp() override {
    if (!device::available()) GTEST_SKIP() << "no GPU";
  }
  static Tensor normal(const Shape& shape) {
    Tensor t = Tensor::empty(shape, DType::F32, Device::CUDA);
    on(t).fill_normal(t, 1, RandomStream(3, "ladder"), {}, 0);
    return t;
  }
  static Tensor poisoned(const Shape& shape) {
    Tensor t = Tensor::empty(shape, DType::F32, Device::CUDA);
    on(t).fill(t, NAN);
    return t;
  }
  // How many kernels a call launches: it is captured into a graph instead of run.
  static int launches(const std::function<void()>& call) {
    check(cudaStreamBeginCapture(device::stream(), cudaStreamCaptureModeGlobal));
    call();
    cudaGraph_t graph = nullptr;
    check(cudaStreamEndCapture(device::stream(), &graph));
    size_t count = 0;
    check(cudaGraphGetNodes(graph, nullptr, &count));
    std::vector<cudaGraphNode_t> nodes(count);
    check(cudaGraphGetNodes(graph, nodes.data(), &count));
    int kernels = 0;
    for (cudaGraphNode_t node : nodes) {
      cudaGraphNodeType type;
      check(cudaGraphNodeGetType(node, &type));
      kernels += type == cudaGraphNodeTypeKernel;
    }
    check(cudaGraphDestroy(graph));
    return kernels;
  }
  // Median time of each, taken in turns.
  static std::vector<double> seconds(const std::vector<std::function<void()>>& calls) {
    std::vector<ladder::Run> runs;
    for (const auto& call : calls) runs.push_back({"", "", [call](cudaStream_t) { call(); }});
    return ladder::time_in_turns(runs, 5);
  }
};

// The sizes of ladder::odd_sizes(), aligned and not; NaN before, guards around.
TEST_F(GpuLadder, Pitfall100_EveryFp32RungIsRightAtEverySize) {
  std::vector<ladder::MatmulRung> rungs = ladder::fp32_ladder();
  ASSERT_EQ(rungs.size(), 8u);
  for (const auto& rung : rungs)
    for (const Shape& s : ladder::odd_sizes())
      for (int64_t shift : {0, 1}) {
        ladder::Matmul p{s[0], s[1], s[2], Op::N, Op::N, DType::F32, DType::F32};
        ASSERT_TRUE(rung.takes(p)) << rung.name;
        EXPECT_EQ(ladder::complaint_about(rung, p, shift), "");
      }
}

TEST_F(GpuLadder, Pitfall101_RowMajorByHandAndBiasAlongTheColumns) {
  Tensor a = Tensor::from<float>({1, 2, 3, 4, 5, 6}, {2, 3}, Device::CUDA);
  Tensor b = Tensor::from<float>({1, 0, 0, 1, 1, 1}, {3, 2}, Device::CUDA);
  Tensor bias = Tensor::from<float>({10, 20}, {2}, Device::CUDA);
  std::vector<ladder::MatmulRung> rungs = ladder::fp32_ladder();
  rungs.push_back(ladder::cublas_sgemm());
  for (const auto& rung : rungs) {
    Tensor c = poisoned({2, 2});
    ladder::Matmul p{2, 2, 3, Op::N, Op::N, DType::F32, DType::F32};
    p.a = a.raw(), p.b = b.raw(), p.c = c.raw();
    rung.launch(p, device::stream());
    EXPECT_EQ(c.values<float>(), (std::vector<float>{4, 5, 10, 11})) << rung.name;
    on(c).add_bias(c, bias);
    EXPECT_EQ(c.values<float>(), (std::vector<float>{14, 25, 20, 31})) << rung.name;
  }
}

TEST_F(GpuLadder, K1_VectorAddOfEveryLength) {
  for (int64_t n : {0, 1, 255, 256, 257, 100'003}) {
    Tensor a = normal({n}), b = normal({n}), c = poisoned({n});
    basics::vector_add(c, a, b);
    std::vector<float> x = a.values<float>(), y = b.values<float>(), z = c.values<float>();
    for (size_t i = 0; i < z.size(); ++i) ASSERT_EQ(z[i], x[i] + y[i]) << i << " of " << n;
  }
}

TEST_F(GpuLadder, K2_EluFusedAndSeparateAreEqualAndFusedIsFaster) {
  Tensor x = normal({10'000'019}), separate = poisoned(x.shape()), fused = poisoned(x.shape());
  basics::elu_separate(separate, x);
  basics::elu_fused(fused, x);
  std::vector<float> in = x.values<float>(), a = separate.values<float>();
  EXPECT_EQ(a, fused.values<float>());
  for (size_t i = 0; i < in.size(); ++i) {
    double expected = in[i] > 0 ? double(in[i]) : std::exp(double(in[i])) - 1;
    ASSERT_NEAR(a[i], expected, 1e-6) << i;
  }
  auto times =
      seconds({[&] { basics::elu_separate(separate, x); }, [&] { basics::elu_fused(fused, x); }});
  EXPECT_GT(times[0], 2 * times[1]);  // 7 tensors moved, and 2
  EXPECT_EQ(launches([&] { basics::elu_separate(separate, x); }), 3);
  EXPECT_EQ(launches([&] { basics::elu_fused(fused, x); }), 1);
}

// Each rung's lesson, in time: at least a part of what the text promises.
TEST_F(GpuLadder, K3_K4_K5_EachLessonOfTheLadderShows) {
  ladder::RandomMatmul matmul({2048, 2048, 2048, Op::N, Op::N, DType::F32, DType::F32});
  std::vector<std::function<void()>> calls;
  for (const auto& rung : ladder::fp32_ladder())
    calls.push_back([&, rung] { rung.launch(matmul.problem(), device::stream()); });
  std::vector<double> t = seconds(calls);
  EXPECT_GT(t[0], 5 * t[1]) << "K3: coalesced reads";
  EXPECT_GT(t[1], 1.25 * t[2]) << "K4: tiles in shared memory";
  EXPECT_GT(t[2], 1.4 * t[3]) << "K5: several sums in a thread";
  EXPECT_GT(t[3], 2 * t.back()) << "the rest of the ladder";
}

TEST_F(GpuLadder, K6_ThreadsThatDisagreeTakeTurns) {
  Tensor out = poisoned({1 << 20}), same = poisoned({1 << 20});
  auto times =
      seconds({[&] { basics::go_ways(out, 32, false); }, [&] { basics::go_ways(same, 32, true); }});
  EXPECT_GT(times[0], 8 * times[1]);
  for (float value : out.values<float>()) ASSERT_TRUE(value >= 0 && value <= 62.1f);
}

TEST_F(GpuLadder, K7_LayerNormFusedAndSeparateAreEqualAndFusedIsFaster) {
  for (const Shape& shape : {Shape{3, 1}, Shape{5, 257}, Shape{2000, 10'000}}) {
    Tensor x = normal(shape), gain = normal({shape[1]}), bias = normal({shape[1]});
    Tensor separate = poisoned(shape), fused = poisoned(shape);
    basics::layer_norm_separate(separate, x, gain, bias);
    basics::layer_norm_fused(fused, x, gain, bias);
    std::vector<float> in = x.values<float>(), a = separate.values<float>();
    std::vector<float> b = fused.values<float>(), g = gain.values<float>(),
                       c = bias.values<float>();
    for (int64_t row = 0; row < std::min<int64_t>(shape[0], 10); ++row) {
      double mean = 0, variance = 0;
      int64_t width = shape[1], first = row * width;
      for (int64_t j = 0; j < width; ++j) mean += in[size_t(first + j)] / double(width);
      for (int64_t j = 0; j < width; ++j)
        variance += std::pow(in[size_t(first + j)] - mean, 2) / double(width);
      for (int64_t j = 0; j < width; ++j) {
        size_t i = size_t(first + j);
        double expected = (in[i] - mean) / std::sqrt(variance + basics::kLayerNormEpsilon);
        expected = expected * g[size_t(j)] + c[size_t(j)];
        ASSERT_NEAR(a[i], expected, 2e-5) << to_string(shape) << " separate";
        ASSERT_NEAR(b[i], expected, 2e-5) << to_string(shape) << " fused";
      }
    }
    if (shape[0] < 1000) continue;
    auto times = seconds({[&] { basics::layer_norm_separate(separate, x, gain, bias); },
                          [&] { basics::layer_norm_fused(fused, x, gain, bias); }});
    EXPECT_GT(times[0], 2 * times[1]);  // 10 tensors moved, and 2
    EXPECT_EQ(launches([&] { basics::layer_norm_separate(separate, x, gain, bias); }), 6);
    EXPECT_EQ(launches([&] { basics::layer_norm_fused(fused, x, gain, bias); }), 1);
  }
}

TEST_F(GpuLadder, SquaresOfHundredsOfGradientsAreAFewLaunches) {
  std::vector<Tensor> gradients(272, normal({1000}));
  Tensor sums = Tensor::empty({272}, DType::F64, Device::CUDA);
  EXPECT_EQ(launches([&] { on(sums).sum_squares(sums, gradients); }), 6);  // 2 for each 128
}

// 10,000 x 10,000 as in the source. A launch returns long before the kernel has run.
TEST_F(GpuLadder, K9_AHostClockWithoutWaitingTimesTheLaunch) {
  Tensor x = normal({10'000, 10'000}), y = poisoned(x.shape());
  Tensor gain = normal({10'000}), bias = normal({10'000});
  auto call = [&] { basics::layer_norm_fused(y, x, gain, bias); };
  double right = seconds({call})[0];
  std::vector<double> wrong;
  for (int i = 0; i < 5; ++i) {
    device::synchronize();
    auto begin = std::chrono::steady_clock::now();
    call();
    wrong.push_back(
        std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count());
  }
  std::sort(wrong.begin(), wrong.end());
  EXPECT_LT(wrong[2], 0.5 * right);
  EXPECT_LT(2 * double(x.bytes()) / right, 20e12) << "faster than any memory: not measured";
}

}  // namespace
}  // namespace lockstep
