// The kernels of the layers between the matrix products: norm, RoPE, SwiGLU, bias, embedding.

#include "tests/kernels_testing.h"

namespace lockstep {
namespace {

class LayerKernels : public KernelTest {};
INSTANTIATE_TEST_SUITE_P(Devices, LayerKernels, testing::ValuesIn(all_cases()), name_of_case);

// Odd widths, multiples of every vector width, and rows too wide for one load per thread.
const std::vector<int64_t> kWidths = {1, 3, 8, 33, 65, 257, 576, 1600, 4104, 10000, 16376};

TEST_P(LayerKernels, RmsNormWithAndWithoutResidual) {
  for (int64_t width : kWidths)
    for (bool adds : {false, true}) {
      const int64_t rows = 3;
      Tensor x = random({rows, width}), gain = random({width});
      Tensor delta = adds ? random({rows, width}) : Tensor();
      Tensor sum = adds ? output({rows, width}) : Tensor();
      Tensor y = output({rows, width}), rstd = output({rows}, sums());
      run().rmsnorm(y, rstd, x, delta, sum, gain, 1e-5f);

      if (adds) {
        Doubles a = read(x), b = read(delta);
        expect_close(sum, filled(rows * width, [&](int64_t i) { return a[i] + b[i]; }), tolerance(),
                     text("sum, width ", width));
      }
      Doubles in = read(adds ? sum : x), g = read(gain), r(rows);
      for (int64_t t = 0; t < rows; ++t) {
        double squares = 0;
        for (int64_t j = 0; j < width; ++j) squares += in[t * width + j] * in[t * width + j];
        r[t] = 1 / std::sqrt(squares / double(width) + double(1e-5f));
      }
      auto normed = [&](int64_t i) { return in[i] * r[i / width] * g[i % width]; };
      expect_close(rstd, r, sums() == DType::F32 ? 2e-5 : 1e-11, text("rstd, width ", width));
      expect_close(y, filled(rows * width, normed), tolerance(), text("y, width ", width));
    }
}

TEST_P(LayerKernels, RmsNormBackwardWithAndWithoutResidual) {
  for (int64_t width : kWidths)
    for (bool adds : {false, true}) {
      const int64_t rows = 3;
      Tensor x = random({rows, width}), gain = random({width}), dy = random({rows, width});
      Tensor d_sum = adds ? random({rows, width}) : Tensor();
      Tensor rstd = with({rows}, {0.5, 1.25, 2}, sums()), dx = output({rows, width});
      run().rmsnorm_backward(dx, dy, d_sum, x, rstd, gain);

      Doubles in = read(x), g = read(gain), d = read(dy), r = read(rstd), expected;
      Doubles through = adds ? read(d_sum) : Doubles(size_t(rows * width), 0.0);
      for (int64_t t = 0; t < rows; ++t) {
        double mean = 0;
        for (int64_t j = 0; j < width; ++j) {
          int64_t i = t * width + j;
          mean += d[i] * g[j] * in[i] * r[t] / double(width);
        }
        for (int64_t j = 0; j < width; ++j) {
          int64_t i = t * width + j;
          expected.push_back(r[t] * (d[i] * g[j] - in[i] * r[t] * mean) + through[i]);
        }
      }
      expect_close(dx, expected, tolerance(), text("width ", width));
    }
}

// Sums over rows: any width, any number of rows, and the same bits in every run.
TEST_P(LayerKernels, Pitfall103_AnyWidthAndBitwiseRepeatable) {
  for (DType grad_type : gradient_types())
    for (int64_t width : {1600, 33, 1, 8, 264})
      for (int64_t rows : {1, 257, 700}) {
        Tensor dy = random({rows, width}), x = random({rows, width});
        Tensor rstd = random({rows}, sums()), before = random({width}, grad_type);
        Doubles d = read(dy), in = read(x), r = read(rstd), start = read(before);
        Doubles gain_sum = start, bias_sum = start;
        double terms = 1;
        for (int64_t i = 0; i < rows * width; ++i) {
          gain_sum[i % width] += d[i] * in[i] * r[i / width];
          bias_sum[i % width] += d[i];
          terms = std::max(terms, std::abs(d[i] * in[i] * r[i / width]));
        }
        auto repeated = [&](const char* what, const Doubles& expected, auto&& kernel) {
          std::vector<std::byte> first;
          for (int i = 0; i < 20; ++i) {
            Tensor grad = with({width}, start, grad_type);
            kernel(grad);
            if (i == 0) first = bytes_of(grad);
            ASSERT_EQ(bytes_of(grad), first) << what << ", width " << width << ", run " << i;
            if (i > 0) continue;
            double rounding = grad_type == DType::BF16  ? 6e-3
                              : grad_type == DType::F32 ? 1e-4
                                                        : 1e-11;
            expect_close(grad, expected, rounding, text(what, " [", rows, ", ", width, "]"), terms);
          }
        };
        repeated("gain", gain_sum,
                 [&](const Tensor& grad) { run().rmsnorm_gain_backward(grad, dy, x, rstd); });
        repeated("bias", bias_sum, [&](const Tensor& grad) { run().bias_backward(grad, dy); });
      }
}

TEST_P(LayerKernels, AddBias) {
  for (int64_t width : kWidths) {
    Tensor y = random({3, width}), bias = random({width});
    Doubles before = read(y), b = read(bias);
    run().add_bias(y, bias);
    expect_close(y, filled(3 * width, [&](int64_t i) { return before[i] + b[i % width]; }),
                 tolerance(), text("width ", width));
  }
}

TEST_P(LayerKernels, RopeTurnsQueriesAndKeysAndTurnsThemBack) {
  for (const AttentionShape& s :
       {AttentionShape{1, 3, 1, 1, 2}, AttentionShape{1, 5, 4, 2, 6},
        AttentionShape{1, 3, 3, 1, 64}, AttentionShape{1, 2, 2, 2, 258}}) {
    int64_t rows = s.sequences * s.length, d = s.head_dim, half = d / 2, width = s.columns();
    Tensor qkv = random({rows, width}), out = output({rows, width}), back = output({rows, width});
    std::vector<int32_t> where;
    for (int64_t t = 0; t < rows; ++t) where.push_back(int32_t(7 * t * t + t));
    Tensor positions = integers(where);
    auto frequency = [&](int64_t i) { return std::pow(10000.0, -2.0 * double(i) / double(d)); };
    Tensor inv_freq = with({half}, filled(half, frequency), sums());
    run().rope(out, qkv, positions, inv_freq, s, false);
    run().rope(back, out, positions, inv_freq, s, true);

    Doubles x = read(qkv), f = read(inv_freq), expected = x;
    for (int64_t t = 0; t < rows; ++t)
      for (int64_t h = 0; h < s.heads + s.kv_heads; ++h)
        for (int64_t i = 0; i < half; ++i) {
          double angle = double(where[size_t(t)]) * f[size_t(i)];
          if (type() != DType::F64) angle = double(float(angle));
          int64_t a = t * width + h * d + i, b = a + half;
          expected[a] = x[a] * std::cos(angle) - x[b] * std::sin(angle);
          expected[b] = x[b] * std::cos(angle) + x[a] * std::sin(angle);
        }
    expect_close(out, expected, tolerance(), text("head ", d));
    expect_close(back, x, tolerance(1e-2), text("back, head ", d));
    Doubles got = read(out);
    for (int64_t t = 0; t < rows; ++t)
      for (int64_t j = (s.heads + s.kv_heads) * d; j < width; ++j)
        ASSERT_EQ(got[t * width + j], x[t * width + j]) << "v is copied";
  }
}

TEST_P(LayerKernels, SwiGluForwardAndBackward) {
  for (int64_t width : {1, 3, 8, 33, 257, 2056}) {
    Tensor gate_up = random({3, 2 * width}, type(), 3), d_out = random({3, width});
    Tensor out = output({3, width}), d_gate_up = output({3, 2 * width});
    run().swiglu(out, gate_up);
    run().swiglu_backward(d_gate_up, d_out, gate_up);

    Doubles in = read(gate_up), d = read(d_out), y, dx(in.size());
    for (int64_t i = 0; i < 3 * width; ++i) {
      int64_t at = i / width * 2 * width + i % width;
      double g = in[at], u = in[at + width], s = 1 / (1 + std::exp(-g));
      y.push_back(g * s * u);
      dx[at] = d[i] * u * s * (1 + g * (1 - s));
      dx[at + width] = d[i] * g * s;
    }
    expect_close(out, y, tolerance(), text("width ", width));
    expect_close(d_gate_up, dx, tolerance(), text("backward, width ", width));
  }
}

TEST_P(LayerKernels, SwiGluSaturatesWithoutNaN) {
  Tensor gate_up = with({1, 8}, {-1000, -100, 100, 1000, 1, 1, 1, 1});
  Tensor out = output({1, 4}), d_gate_up = output({1, 8});
  run().swiglu(out, gate_up);
  run().swiglu_backward(d_gate_up, with({1, 4}, {1, 1, 1, 1}), gate_up);
  expect_close(out, {0, 0, 100, 1000}, tolerance());
  expect_close(d_gate_up, {0, 0, 1, 1, 0, 0, 100, 1000}, tolerance());
}

// A shard of the table holds rows 5 to 11; ids before and behind it give zeros and no gradient.
const std::vector<int32_t> kIds = {5, 11, 4, 7, 7, 0, 12, 5, 7, 7, -1, 6, 7};
constexpr int64_t kFirst = 5, kRows = 7;
bool is_here(int32_t id) { return id >= kFirst && id < kFirst + kRows; }

TEST_P(LayerKernels, EmbeddingCopiesRowsOfThisShard) {
  for (int64_t width : {1, 3, 8, 33, 257, 2056}) {
    Tensor table = random({kRows, width}), out = output({int64_t(kIds.size()), width});
    run().embedding(out, table, integers(kIds), kFirst);
    Doubles from = read(table), got = read(out);
    for (size_t i = 0; i < got.size(); ++i) {
      int32_t id = kIds[i / size_t(width)];
      double expected = is_here(id) ? from[(id - kFirst) * width + int64_t(i) % width] : 0;
      ASSERT_EQ(got[i], expected) << "width " << width << ", element " << i;
    }
  }
}

TEST_P(LayerKernels, EmbeddingBackwardAddsRepeatedRowsInOrder) {
  std::vector<int32_t> many = kIds;  // also enough tokens for every path of the sort
  for (int32_t t = 0; t < 9000; ++t) many.push_back(t * 31 % 17);
  for (DType grad_type : gradient_types())
    for (int64_t width : {1, 3, 8, 33})
      for (const std::vector<int32_t>& ids : {kIds, many}) {
        int64_t count = int64_t(ids.size());
        Tensor d_out = random({count, width}), before = random({kRows, width}, grad_type);
        Doubles d = read(d_out), start = read(before), expected = start;
        for (int64_t i = 0; i < count * width; ++i) {
          int32_t id = ids[size_t(i / width)];
          if (is_here(id)) expected[(id - kFirst) * width + i % width] += d[i];
        }
        std::vector<std::byte> first;
        for (int i = 0; i < 5; ++i) {
          Tensor d_table = with({kRows, width}, start, grad_type);
          run().embedding_backward(d_table, d_out, integers(ids), kFirst);
          if (i == 0) first = bytes_of(d_table);
          ASSERT_EQ(bytes_of(d_table), first) << "run " << i;
          double rounding = grad_type == DType::BF16  ? 6e-3
                            : grad_type == DType::F32 ? 1e-4
                                                      : 1e-11;
          expect_close(d_table, expected, rounding, text(count, " tokens, width ", width), 10);
        }
      }
}

TEST_P(LayerKernels, NoRowsAreNoWork) {
  Tensor none = output({0, 8}), wide = output({0, 16}), gain = random({8});
  Tensor rstd = output({0}, sums()), grad = random({8}), ids = integers(std::vector<int32_t>{});
  Tensor inv_freq = random({1}, sums());
  Doubles before = read(grad);
  run().rmsnorm(none, rstd, none, none, none, gain, 1e-5f);
  run().rmsnorm_backward(none, none, none, none, rstd, gain);
  run().rmsnorm_gain_backward(grad, none, none, rstd);
  run().bias_backward(grad, none);
  run().add_bias(none, gain);
  run().swiglu(none, wide);
  run().swiglu_backward(wide, none, wide);
  run().rope(none, none, ids, inv_freq, {0, 4, 2, 1, 2}, false);
  run().embedding(none, random({4, 8}), ids, 0);
  run().embedding_backward(grad.view({1, 8}), none, ids, 0);
  EXPECT_EQ(read(grad), before);
}

}  // namespace
}  // namespace lockstep
