// The bf16 ladder of chapter 08: every rung against sums in double precision, what it takes and
// what it costs; and that the check which all of this rests on finds what is wrong.

#include <gtest/gtest.h>

#include "08_kernels/bf16_ladder.h"
#include "08_kernels/sgemm.h"
#include "08_kernels/use_matmul.h"
#include "common/device.h"
#include "common/device_cuda.h"
#include "common/flops.h"

namespace lockstep::ladder {
namespace {

class MatmulLadder : public testing::Test {
 protected:
  void SetUp() override {
    if (!device::available()) GTEST_SKIP() << "no GPU";
  }
};

const std::pair<Op, Op> kOps[] = {{Op::N, Op::T}, {Op::N, Op::N}, {Op::T, Op::N}, {Op::T, Op::T}};

// All rungs, and mma.sync as it runs on a GPU with less shared memory.
std::vector<MatmulRung> all_rungs() {
  std::vector<MatmulRung> rungs = bf16_ladder();
  rungs.push_back(mma_sync(2));
  rungs.back().name += ", two stages";
  return rungs;
}

// What the rung gets is what complaint_about() will give it, as far as takes() can tell.
bool takes(const MatmulRung& rung, const Matmul& p, int64_t shift) {
  Matmul at = p;
  at.a = at.b = at.c = reinterpret_cast<void*>(256 + 2 * shift);
  return rung.takes(at);
}

TEST_F(MatmulLadder, Pitfall100_EveryBf16RungIsRightAtEverySizeThatItTakes) {
  for (const MatmulRung& rung : all_rungs()) {
    int ran = 0;
    for (const Shape& s : odd_sizes())
      for (int64_t shift : {0, 1})
        for (DType out : {DType::BF16, DType::F32})
          for (float beta : {0.0f, 1.0f, 0.5f})
            for (auto [ta, tb] : kOps) {
              Matmul p{s[0], s[1], s[2], ta, tb, DType::BF16, out, beta};
              if (!takes(rung, p, shift)) continue;
              EXPECT_EQ(complaint_about(rung, p, shift), "");
              ++ran;
            }
    EXPECT_TRUE(ran > 0 || !rung.takes({1000, 1000, 1000, Op::N, Op::T})) << rung.name;
  }
}

// More rows than a grid has, or more than an int counts: refused before anything is launched.
TEST(MatmulSizes, WhatARungCannotCountItDoesNotTake) {
  for (const MatmulRung& rung : {wmma_rung(), mma_sync(), mma_sync(2), sgemm_naive()}) {
    const DType type = rung.name == "naive" ? DType::F32 : DType::BF16;
    auto takes = [&](int64_t m, int64_t n, int64_t k) {
      return rung.takes({m, n, k, Op::N, Op::N, type, type});
    };
    EXPECT_TRUE(takes(100'000, 8, 8)) << rung.name;
    EXPECT_FALSE(takes(int64_t(1) << 31, 1, 1)) << rung.name;
    if (rung.name == "wmma") continue;  // counts columns and depth in 64 bits
    EXPECT_FALSE(takes(1, INT32_MAX, 1)) << rung.name;
    EXPECT_FALSE(takes(1, 1, INT32_MAX)) << rung.name;
  }
  for (int64_t rows : {65535, 65536}) {
    EXPECT_EQ(wmma_rung().takes({64 * rows, 1, 1}), rows == 65535);
    EXPECT_EQ(sgemm_naive().takes({32 * rows, 1, 1, Op::N, Op::N, DType::F32, DType::F32}),
              rows == 65535);
  }
}

// A block that walks from tile to tile copies the beginning of the next one early, or of the next
// two, where each is a single step along k.
TEST_F(MatmulLadder, MoreTilesThanMultiprocessorsAreRightOnEveryRung) {
  for (const MatmulRung& rung : all_rungs())
    for (int64_t k : {0, 8, 72})
      for (int64_t shift : {0, 1})
        for (auto [ta, tb] : kOps) {
          DType out = k == 8 ? DType::BF16 : DType::F32;
          Matmul p{2600, 2312, k, ta, tb, DType::BF16, out, k == 72 ? 1.0f : 0.0f};
          if (takes(rung, p, shift)) {
            EXPECT_EQ(complaint_about(rung, p, shift), "");
          }
        }
}

// The last rung takes everything; that includes the shapes in which its tiles are cut off on one
// side only, and more tiles than there are multiprocessors.
TEST_F(MatmulLadder, TheLastRungTakesEverything) {
  for (const Shape& s : {Shape{128, 256, 64}, {129, 8, 8}, {8, 2056, 72}, {4104, 3080, 264}})
    for (DType out : {DType::BF16, DType::F32})
      for (float beta : {0.0f, 1.0f})
        for (auto [ta, tb] : kOps)
          EXPECT_EQ(
              complaint_about(best_matmul(), {s[0], s[1], s[2], ta, tb, DType::BF16, out, beta}),
              "");
  EXPECT_EQ(complaint_about(best_matmul(), {0, 5, 3, Op::N, Op::T}), "");
}

// Rounds of tiles that clusters share: a last one, the only one, and so few tiles that several
// clusters work on each. Again and again, since flags have to be back at zero.
TEST_F(MatmulLadder, SharedTilesAreRight) {
  const MatmulRung rung = hopper_stream_k();
  for (const Shape& s : {Shape{2560, 2304, 3000}, {2040, 1288, 4104}, {1288, 512, 8200}})
    for (DType out : {DType::BF16, DType::F32})
      for (auto [ta, tb] : kOps)
        for (float beta : {0.0f, 1.0f}) {
          Matmul p{s[0], s[1], s[2], ta, tb, DType::BF16, out, beta};
          if (takes(rung, p, 0)) {
            EXPECT_EQ(complaint_about(rung, p), "");
          }
        }
}

// Sums are added in a fixed order, whoever comes first.
TEST_F(MatmulLadder, SharedTilesAreTheSameEveryTime) {
  const MatmulRung rung = hopper_stream_k();
  RandomMatmul matmul({1288, 512, 8200, Op::N, Op::T, DType::BF16, DType::F32});
  const Matmul& p = matmul.problem();
  if (!rung.takes(p)) GTEST_SKIP() << "no Hopper";
  auto result = [&] {
    rung.launch(p, device::stream());
    std::vector<float> values(size_t(p.m * p.n));
    check(cudaMemcpyAsync(values.data(), p.c, values.size() * sizeof(float), cudaMemcpyDeviceToHost,
                          device::stream()));
    device::synchronize();
    return values;
  };
  std::vector<float> first = result();
  for (int i = 0; i < 5; ++i) EXPECT_EQ(result(), first);
}

// A mistake that square matrices hide: rows taken for columns, and a bias along the wrong
// dimension.
TEST_F(MatmulLadder, Pitfall101_RowMajorByHandAndBiasAlongTheColumns) {
  auto on_gpu = [](std::vector<float> values, Shape shape) {
    std::vector<bf16> rounded(values.begin(), values.end());
    return Tensor::from(rounded, std::move(shape), Device::CUDA);
  };
  Tensor a = on_gpu({1, 2, 3, 4, 5, 6}, {2, 3}), b = on_gpu({1, 0, 0, 1, 1, 1}, {3, 2});
  Tensor bias = on_gpu({10, 20}, {2});
  for (const MatmulRung& rung : bf16_ladder()) {
    Tensor c = Tensor::empty({2, 2}, DType::F32, Device::CUDA);
    Matmul p{2, 2, 3, Op::N, Op::N, DType::BF16, DType::F32, 0, a.raw(), b.raw(), c.raw()};
    if (!rung.takes(p)) continue;
    rung.launch(p, device::stream());
    EXPECT_EQ(c.values<float>(), (std::vector<float>{4, 5, 10, 11})) << rung.name;
    Tensor narrow = Tensor::empty({2, 2}, DType::BF16, Device::CUDA);
    on(narrow).cast(narrow, c);
    on(narrow).add_bias(narrow, bias);
    on(c).cast(c, narrow);
    EXPECT_EQ(c.values<float>(), (std::vector<float>{14, 25, 20, 31})) << rung.name;
  }
}

// A benchmark that forgets to wait times the launch: the numbers are then above what the GPU can
// do, or do not grow with the work.
TEST_F(MatmulLadder, Pitfall105_TimesGrowWithTheWorkAndNoneIsAboveThePeak) {
  std::optional<double> peak = peak_flops(device::name(Device::CUDA), DType::BF16);
  RandomMatmul small({2048, 2048, 2048, Op::N, Op::T}), large({4096, 4096, 4096, Op::N, Op::T});
  for (const MatmulRung& rung : bf16_ladder()) {
    if (!rung.takes(small.problem())) continue;
    auto run = [&](const RandomMatmul& m) {
      return ladder::Run{"", "", [&](cudaStream_t stream) { rung.launch(m.problem(), stream); }};
    };
    std::vector<double> seconds = time_in_turns({run(small), run(large)}, 9);
    EXPECT_GT(seconds[1] / seconds[0], 8 * 0.7) << rung.name;
    EXPECT_LT(seconds[1] / seconds[0], 8 * 1.3) << rung.name;
    if (peak) {
      EXPECT_LT(large.problem().flops() / seconds[1], *peak) << rung.name;
    }
  }
}

TEST_F(MatmulLadder, TheCheckFindsWhatIsWrong) {
  const MatmulRung right = mma_sync();
  auto complaint = [&](auto launch, float beta = 0) {
    MatmulRung wrong{"wrong", "", right.takes, launch};
    return complaint_about(wrong, {35, 79, 19, Op::N, Op::T, DType::BF16, DType::F32, beta});
  };
  EXPECT_EQ(complaint(right.launch), "");
  EXPECT_NE(complaint([](const Matmul&, cudaStream_t) {}), "");
  EXPECT_NE(complaint([&](Matmul p, cudaStream_t s) { p.m -= 1, right.launch(p, s); }), "");
  EXPECT_NE(complaint([&](Matmul p, cudaStream_t s) { p.beta = 0, right.launch(p, s); }, 1), "");
  EXPECT_NE(complaint([&](Matmul p, cudaStream_t s) {
              right.launch(p, s);
              p.m = p.n = 1, p.c = static_cast<float*>(p.c) + 35 * 79;  // one behind the end
              right.launch(p, s);
            }),
            "");
}

TEST_F(MatmulLadder, TheModelsMatmulIsTheLastRungOrTheLibrary) {
  Kernels table = kernels(Device::CUDA);
  auto before = table.matmul;
  use_own_matmul(table);
  EXPECT_NE(table.matmul, before);
  // On a Hopper of 132 multiprocessors the own kernel is worth it for the first size only.
  for (const Shape& s : {Shape{1536, 2816, 4096}, {35, 79, 19}}) {
    MatmulRung slot{"slot", "", [](const Matmul&) { return true; },
                    [&](const Matmul& p, cudaStream_t) {
                      auto wrap = [](const void* data, Shape shape, DType type) {
                        Tensor t = Tensor::empty(shape, type, Device::CUDA);
                        check(cudaMemcpyAsync(t.raw(), data, size_t(t.bytes()),
                                              cudaMemcpyDeviceToDevice, device::stream()));
                        return t;
                      };
                      Tensor c = wrap(p.c, {p.m, p.n}, p.out);
                      table.matmul(c, wrap(p.a, {p.m, p.k}, p.in), p.ta,
                                   wrap(p.b, {p.n, p.k}, p.in), p.tb, p.beta);
                      check(cudaMemcpyAsync(p.c, c.raw(), size_t(c.bytes()),
                                            cudaMemcpyDeviceToDevice, device::stream()));
                    }};
    for (float beta : {0.0f, 1.0f})
      EXPECT_EQ(
          complaint_about(slot, {s[0], s[1], s[2], Op::N, Op::T, DType::BF16, DType::F32, beta}),
          "");
  }
}

}  // namespace
}  // namespace lockstep::ladder
