// Attention of new rows over a cache, against plain loops in double.

#include "tests/kernels_testing.h"

namespace lockstep {
namespace {

class DecodeKernels : public KernelTest {
 protected:
  // softmax(q k^T / sqrt(d)) v over the remembered rows, the new ones among them.
  Doubles reference(const Doubles& keys, const Doubles& values, const Doubles& qkv,
                    const AttentionShape& s, int64_t past) const {
    int64_t d = s.head_dim, kv_width = s.kv_heads * d;
    Doubles out;
    for (int64_t i = 0; i < s.length; ++i)
      for (int64_t h = 0; h < s.heads; ++h) {
        const double* q = &qkv[size_t(i * s.columns() + h * d)];
        int64_t column = h / (s.heads / s.kv_heads) * d;
        Doubles weights, sums(size_t(d), 0.0);
        double total = 0;
        for (int64_t j = 0; j <= past + i; ++j) {
          double score = 0;
          for (int64_t c = 0; c < d; ++c) score += q[c] * keys[size_t(j * kv_width + column + c)];
          weights.push_back(std::exp(score / std::sqrt(double(d))));
          total += weights.back();
        }
        for (int64_t j = 0; j <= past + i; ++j)
          for (int64_t c = 0; c < d; ++c)
            sums[size_t(c)] +=
                weights[size_t(j)] / total * values[size_t(j * kv_width + column + c)];
        out.insert(out.end(), sums.begin(), sums.end());
      }
    return out;
  }
};
INSTANTIATE_TEST_SUITE_P(Devices, DecodeKernels, testing::ValuesIn(all_cases()), name_of_case);

struct Situation {
  AttentionShape shape;
  int64_t past, longest;
};
const std::vector<Situation> kSituations = {
    {{1, 1, 1, 1, 2}, 0, 1},       // the very first row
    {{1, 1, 4, 2, 6}, 7, 8},       // one more, and the cache is full
    {{1, 5, 4, 2, 6}, 0, 9},       // a prompt
    {{1, 5, 6, 3, 33}, 4, 20},     // several rows onto a past
    {{1, 1, 3, 1, 64}, 300, 512},  // more keys than threads
    {{1, 130, 2, 2, 64}, 3, 140},  // more rows than a block of the CPU's
    {{1, 2, 2, 1, 128}, 40, 50},   // MQA
    {{1, 3, 2, 1, 256}, 20, 23},   // the widest head that CUDA takes
};

TEST_P(DecodeKernels, AttentionOverACacheRemembersAndAttends) {
  for (const Situation& at : kSituations) {
    const AttentionShape& s = at.shape;
    int64_t kv_width = s.kv_heads * s.head_dim, used = at.past * kv_width;
    std::string what = text("past ", at.past, ", ", s.length, " rows, head ", s.head_dim);
    // Behind the past lies memory that nobody wrote: NaN.
    auto cache = [&] {
      Doubles values(size_t(at.longest * kv_width), NAN);
      Doubles past = read(random({std::max<int64_t>(1, at.past), kv_width}));
      std::copy(past.begin(), past.begin() + used, values.begin());
      return with({at.longest, kv_width}, values);
    };
    Tensor keys = cache(), values = cache();
    Tensor qkv = random({s.length, s.columns()}), out = output({s.length, s.heads * s.head_dim});
    Doubles k = read(keys), v = read(values), x = read(qkv);
    for (int64_t i = 0; i < s.length; ++i)
      for (int64_t c = 0; c < kv_width; ++c) {
        int64_t from = i * s.columns() + s.heads * s.head_dim + c, to = used + i * kv_width + c;
        k[size_t(to)] = x[size_t(from)];
        v[size_t(to)] = x[size_t(from + kv_width)];
      }
    run().attention_cached(out, keys, values, qkv, s, at.past);
    expect_close(out, reference(k, v, x, s, at.past), tolerance(1e-2), what);
    // Exactly the new rows were written.
    Doubles k_after = read(keys), v_after = read(values);
    for (size_t i = 0; i < k.size(); ++i) {
      bool is_free = int64_t(i) >= used + s.length * kv_width;
      ASSERT_TRUE(is_free ? std::isnan(k_after[i]) : k_after[i] == k[i]) << what << " key " << i;
      ASSERT_TRUE(is_free ? std::isnan(v_after[i]) : v_after[i] == v[i]) << what << " value " << i;
    }
  }
}

// Scores of +-400: exp of either overflows or vanishes unless the largest is taken off first.
TEST_P(DecodeKernels, AttentionOverACacheSurvivesLargeScores) {
  AttentionShape s{1, 2, 1, 1, 4};
  Tensor keys = with({40, 4}, filled(160, [](int64_t i) { return i / 4 % 2 ? 20 : -20; }));
  Tensor values = with({40, 4}, filled(160, [](int64_t i) { return double(i / 4 % 2); }));
  Tensor qkv = with({2, 12}, filled(24, [](int64_t i) { return i % 12 < 4 ? 10 : 0; }));
  Tensor out = output({2, 4});
  run().attention_cached(out, keys, values, qkv, s, 38);
  expect_close(out, Doubles(8, 1.0), tolerance());
}

TEST_P(DecodeKernels, AttentionOverAFullCacheIsRefused) {
  AttentionShape s{1, 2, 1, 1, 4};
  Tensor keys = random({5, 4}), values = random({5, 4}), qkv = random({2, 12}),
         out = output({2, 4});
  EXPECT_THROW(run().attention_cached(out, keys, values, qkv, s, 4), Error);
  EXPECT_NO_THROW(run().attention_cached(out, keys, values, qkv, s, 3));
}

}  // namespace
}  // namespace lockstep
