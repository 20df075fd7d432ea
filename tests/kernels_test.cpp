// The kernels that every chapter rests on: matrix products, attention, the loss, and what works
// element by element.

#include "tests/kernels_testing.h"

namespace lockstep {
namespace {

class CoreKernels : public KernelTest {};
INSTANTIATE_TEST_SUITE_P(Devices, CoreKernels, testing::ValuesIn(all_cases()), name_of_case);

// ---- Matrix products ----

// A matrix as op() shows it: element (i, j) of op(x).
struct View {
  Doubles x;
  int64_t columns;  // of x as it lies in memory
  Op op;
  double operator()(int64_t i, int64_t j) const {
    return op == Op::N ? x[i * columns + j] : x[j * columns + i];
  }
};
Shape shape_of(Op op, int64_t rows, int64_t columns) {
  return op == Op::N ? Shape{rows, columns} : Shape{columns, rows};
}

TEST_P(CoreKernels, MatmulOfEveryOpTypeAndOddSize) {
  const std::vector<Shape> sizes = {{1, 1, 1},  {3, 33, 65},   {65, 1, 257},  {35, 79, 19},
                                    {64, 8, 1}, {48, 64, 128}, {257, 130, 33}};
  for (const Shape& s : sizes)
    for (Op ta : {Op::N, Op::T})
      for (Op tb : {Op::N, Op::T})
        for (float beta : {0.0f, 1.0f})
          for (DType out : gradient_types()) {
            int64_t m = s[0], n = s[1], k = s[2];
            Tensor a = random(shape_of(ta, m, k)), b = random(shape_of(tb, k, n));
            Tensor c = beta == 0 ? output({m, n}, out) : random({m, n}, out);
            View va{read(a), a.dim(1), ta}, vb{read(b), b.dim(1), tb};
            Doubles expected = beta == 0 ? Doubles(size_t(m * n), 0.0) : read(c);
            double terms = 0;
            for (int64_t i = 0; i < m; ++i)
              for (int64_t j = 0; j < n; ++j) {
                double size = 0;
                for (int64_t l = 0; l < k; ++l) {
                  expected[i * n + j] += va(i, l) * vb(l, j);
                  size += std::abs(va(i, l) * vb(l, j));
                }
                terms = std::max(terms, size);
              }
            run().matmul(c, a, ta, b, tb, beta);
            double bound = out == DType::F64 ? 1e-13 : out == DType::F32 ? 2e-6 : 4e-3;
            expect_close(c, expected, bound,
                         text(s, ta == Op::N ? " N" : " T", tb == Op::N ? "N" : "T", " beta ", beta,
                              " ", name_of(out)),
                         terms);
          }
}

TEST_P(CoreKernels, Pitfall101_RowMajorMatmulAndBiasAxis) {
  Doubles a = {1, 2, 3, 4, 5, 6}, a_turned = {1, 4, 2, 5, 3, 6};
  Doubles b = {1, 0, 0, 1, 1, 1}, b_turned = {1, 0, 1, 0, 1, 1};
  for (Op ta : {Op::N, Op::T})
    for (Op tb : {Op::N, Op::T}) {
      Tensor left = with(shape_of(ta, 2, 3), ta == Op::N ? a : a_turned);
      Tensor right = with(shape_of(tb, 3, 2), tb == Op::N ? b : b_turned);
      Tensor c = output({2, 2});
      run().matmul(c, left, ta, right, tb, 0);
      EXPECT_EQ(read(c), (Doubles{4, 5, 10, 11}));
      run().add_bias(c, with({2}, {10, 20}));
      EXPECT_EQ(read(c), (Doubles{14, 25, 20, 31}));
      run().matmul(c, left, ta, right, tb, 1);  // onto what is there
      EXPECT_EQ(read(c), (Doubles{18, 30, 30, 42}));
    }
}

TEST_P(CoreKernels, MatmulOverNoTermsAndOfNoRows) {
  for (DType out : gradient_types()) {
    Tensor a = output({3, 0}), b = output({0, 5}), fresh = output({3, 5}, out);
    run().matmul(fresh, a, Op::N, b, Op::N, 0);
    EXPECT_EQ(read(fresh), Doubles(15, 0.0));
    Tensor kept = random({3, 5}, out);
    Doubles before = read(kept);
    run().matmul(kept, a, Op::N, b, Op::N, 1);
    EXPECT_EQ(read(kept), before);
    run().matmul(output({0, 5}, out), output({0, 4}), Op::N, random({4, 5}), Op::N, 0);
  }
  EXPECT_THROW(run().matmul(output({2, 2}), random({2, 3}), Op::N, random({2, 3}), Op::N, 0),
               Error);
}

TEST_P(CoreKernels, MatmulIsBitwiseRepeatable) {
  Tensor a = random({1000, 33}), b = random({1000, 65});  // a long sum, tempting to be split
  std::vector<std::byte> first;
  for (int i = 0; i < 5; ++i) {
    Tensor c = output({33, 65}, sums());
    run().matmul(c, a, Op::T, b, Op::N, 0);
    if (i == 0) first = bytes_of(c);
    ASSERT_EQ(bytes_of(c), first);
  }
}

// ---- Attention ----

TEST_P(CoreKernels, AttentionForwardAndBackward) {
  for (const AttentionShape& s :
       {AttentionShape{1, 1, 1, 1, 2}, AttentionShape{2, 3, 4, 2, 4},
        AttentionShape{1, 33, 2, 1, 16}, AttentionShape{2, 65, 3, 3, 8},
        AttentionShape{3, 16, 4, 2, 8}, AttentionShape{1, 257, 6, 2, 4}}) {
    int64_t rows = s.sequences * s.length, n = s.length, d = s.head_dim, w = s.columns();
    int64_t ow = s.heads * d;
    Tensor qkv = random({rows, w}), d_out = random({rows, ow}), out = output({rows, ow});
    Tensor probs = output({s.sequences, s.heads, n, n}), d_qkv = output({rows, w});
    run().attention(out, probs, qkv, s);
    run().attention_backward(d_qkv, d_out, probs, qkv, s);

    Doubles x = read(qkv), d_o = read(d_out), p(probs.size()), o(out.size()), dx(qkv.size());
    double scale = 1 / std::sqrt(double(d));
    for (int64_t b = 0; b < s.sequences; ++b)
      for (int64_t h = 0; h < s.heads; ++h)
        for (int64_t i = 0; i < n; ++i) {
          int64_t kv = h / (s.heads / s.kv_heads), q = (b * n + i) * w + h * d;
          auto k = [&](int64_t j) { return (b * n + j) * w + (s.heads + kv) * d; };
          auto v = [&](int64_t j) { return k(j) + s.kv_heads * d; };
          double* row = p.data() + ((b * s.heads + h) * n + i) * n;
          int64_t at = (b * n + i) * ow + h * d;
          double sum = 0, dot = 0;
          for (int64_t j = 0; j <= i; ++j) {
            for (int64_t l = 0; l < d; ++l) row[j] += scale * x[q + l] * x[k(j) + l];
            sum += row[j] = std::exp(row[j]);
          }
          Doubles dp(size_t(i + 1), 0.0);
          for (int64_t j = 0; j <= i; ++j) {
            row[j] /= sum;
            for (int64_t l = 0; l < d; ++l) {
              o[at + l] += row[j] * x[v(j) + l];
              dx[v(j) + l] += row[j] * d_o[at + l];
              dp[j] += d_o[at + l] * x[v(j) + l];
            }
            dot += row[j] * dp[j];
          }
          for (int64_t j = 0; j <= i; ++j)
            for (int64_t l = 0; l < d; ++l) {
              double ds = scale * row[j] * (dp[j] - dot);
              dx[q + l] += ds * x[k(j) + l];
              dx[k(j) + l] += ds * x[q + l];
            }
        }
    std::string what = text(s.sequences, " x ", n, ", heads ", s.heads, " / ", s.kv_heads);
    expect_close(probs, p, tolerance(2e-2), "probs " + what);
    expect_close(out, o, tolerance(2e-2), "out " + what);
    expect_close(d_qkv, dx, tolerance(3e-2), "d_qkv " + what);
    Doubles got = read(probs);
    for (int64_t i = 0; i < probs.size(); ++i) {
      bool is_future = i % n > i / n % n;
      ASSERT_TRUE(!is_future || got[size_t(i)] == 0) << "the future is masked exactly";
    }
  }
}

TEST_P(CoreKernels, AttentionOverNothing) {
  Tensor qkv = output({0, 8}), out = output({0, 4});
  for (AttentionShape s : {AttentionShape{0, 5, 2, 1, 2}, AttentionShape{3, 0, 2, 1, 2}}) {
    Tensor probs = output({s.sequences, 2, s.length, s.length});
    run().attention(out, probs, qkv, s);
    run().attention_backward(qkv, out, probs, qkv, s);
  }
}

// ---- Loss ----

TEST_P(CoreKernels, CrossEntropyForwardAndBackward) {
  for (int64_t vocab : {1, 3, 33, 64, 257, 5000, 5003}) {
    std::vector<int32_t> wanted = {int32_t(vocab - 1), -100, 0, int32_t(vocab / 2), -1};
    int64_t rows = int64_t(wanted.size());
    Tensor logits = random({rows, vocab}, type(), 5), targets = integers(wanted);
    Tensor scale = with({1}, {0.25}, sums()), d_loss = with({1}, {2}, sums());
    Tensor loss = output({1}, sums()), lse = output({rows}, sums());
    Tensor d_logits = output({rows, vocab});
    run().cross_entropy(loss, lse, logits, targets, scale);
    run().cross_entropy_backward(d_logits, d_loss, logits, lse, targets, scale, 0);

    Doubles x = read(logits), l(wanted.size()), d(x.size());
    double total = 0;
    for (int64_t t = 0; t < rows; ++t) {
      double sum = 0;
      for (int64_t j = 0; j < vocab; ++j) sum += std::exp(x[t * vocab + j]);
      l[t] = std::log(sum);
      if (wanted[t] < 0) continue;
      total += 0.25 * (l[t] - x[t * vocab + wanted[t]]);
      for (int64_t j = 0; j < vocab; ++j)
        d[t * vocab + j] = 0.5 * (std::exp(x[t * vocab + j] - l[t]) - (j == wanted[t]));
    }
    double fine = sums() == DType::F32 ? 2e-5 : 1e-11;
    expect_close(lse, l, fine, text("lse, vocab ", vocab));
    expect_close(loss, {total}, fine, text("loss, vocab ", vocab), 1);
    expect_close(d_logits, d, tolerance(), text("d_logits, vocab ", vocab), 0.5);
    run().cross_entropy_backward(logits, d_loss, logits, lse, targets, scale, 0);  // in place
    EXPECT_EQ(bytes_of(logits), bytes_of(d_logits));
  }
}

TEST_P(CoreKernels, CrossEntropyOfLargeLogitsAndOfNoRows) {
  Tensor scale = with({1}, {1}, sums()), loss = output({1}, sums()), lse = output({2}, sums());
  Tensor logits = with({2, 3}, {10240, 0, -10240, -10240, -10240, -INFINITY});
  run().cross_entropy(loss, lse, logits, integers(std::vector<int32_t>{1, 0}), scale);
  expect_close(lse, {10240, -10240 + std::log(2)}, 1e-6);
  expect_close(loss, {10240 + std::log(2)}, 1e-6);
  Tensor none = output({0, 3});
  run().cross_entropy(loss, lse.flat(0, 0), none, integers(std::vector<int32_t>{}), scale);
  EXPECT_EQ(read(loss), Doubles{0});
}

// ---- Element by element ----

TEST_P(CoreKernels, AddCastAndFill) {
  for (int64_t n : {0, 1, 3, 64, 257, 4097}) {
    Tensor a = random({n}), b = random({n}), out = output({n});
    Doubles x = read(a), y = read(b);
    Doubles sum = filled(n, [&](int64_t i) { return x[i] + y[i]; });
    run().add(out, a, b);
    expect_close(out, sum, tolerance());
    for (DType other : gradient_types()) {
      Tensor wide = with({n}, y, other), narrow = with({n}, x), moved = output({n}, other);
      run().add_into(wide, a);
      run().add_into(narrow, with({n}, y, other));
      run().cast(moved, a);
      expect_close(wide, sum, tolerance());
      expect_close(narrow, sum, tolerance());
      EXPECT_EQ(read(moved), x);
      run().cast(out, moved);
      EXPECT_EQ(read(out), x);
    }
    run().fill(out, -1.5);
    EXPECT_EQ(read(out), Doubles(size_t(n), -1.5));
  }
}

TEST_P(CoreKernels, CastRoundsToNearestEven) {
  Doubles exact = {1 + 1.0 / 256, 1 + 3.0 / 256, 1 + 1.01 / 256, -1 - 1.0 / 256, 3.4e38, 1e-40};
  Tensor out = output({6}, DType::BF16);
  run().cast(out, with({6}, exact, DType::F32));
  Doubles expected;
  for (double v : exact) expected.push_back(double(float(bf16(float(v)))));
  EXPECT_EQ(read(out), expected);
  EXPECT_EQ(expected[0], 1);
  EXPECT_EQ(expected[1], 1 + 4.0 / 256);
}

TEST_P(CoreKernels, NormalNumbersOfAShardAreThoseOfTheWhole) {
  RandomStream stream(3, "weight");
  IndexMap map{5, 12, 4};  // columns 4 to 8 of rows of 12
  Tensor shard = output({33});
  run().fill_normal(shard, 0.5f, stream, map, 7);
  auto value = [&](int64_t i) {
    int64_t local = i + 7;
    return 0.5 * double(stream.normal(uint64_t(local / 5 * 12 + 4 + local % 5)));
  };
  expect_close(shard, filled(33, value), type() == DType::BF16 ? 6e-3 : 1e-5);
}

TEST_P(CoreKernels, DropoutDrawsTheSameNumbersForAShard) {
  const RandomStream stream(3, "dropout");
  const float p = 0.3f;
  for (int64_t columns : {1, 8, 33, 264}) {
    std::vector<int64_t> where = {4, 0, int64_t(1) << 40};
    Tensor x = random({3, columns}), out = output({3, columns});
    run().dropout(out, x, integers(where), p, stream, 1000, 17);
    Doubles in = read(x), got = read(out);
    for (int64_t i = 0; i < 3 * columns; ++i) {
      bool kept = stream.uniform(uint64_t(where[i / columns] * 1000 + 17 + i % columns)) >= p;
      ASSERT_EQ(got[i] != 0, kept) << i;
      ASSERT_NEAR(got[i], kept ? in[i] / 0.7 : 0, 1e-2 * std::abs(in[i]));
    }
  }
  Tensor none = output({0, 8});
  run().dropout(none, none, integers(std::vector<int64_t>{}), p, stream, 8, 0);
}

}  // namespace
}  // namespace lockstep
