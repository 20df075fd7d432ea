// Plain attention, one (sequence, key head) at a time. For each of its query heads, with scale
// 1/sqrt(d):
//   forward    S = scale Q K^T, masked;  P = softmax(S);  O = P V
//   backward   dV += P^T dO;  dP = dO V^T;  dS = scale P (dP - rowsum(P dP));  dQ = dS K;  dK +=
//   dS^T Q

#include <cmath>
#include <cstring>

#include "common/kernels_cpu.h"

namespace lockstep::cpu {

template <class T>
struct Head {
  const AttentionShape& s;
  int64_t sequence, head;
  int length = int(s.length), d = int(s.head_dim), width = int(s.columns());
  int64_t kv() const { return head / (s.heads / s.kv_heads); }
  int64_t row() const { return sequence * s.length * width; }
  T* q(T* qkv) const { return qkv + row() + head * d; }
  T* k(T* qkv) const { return qkv + row() + (s.heads + kv()) * d; }
  T* v(T* qkv) const { return qkv + row() + (s.heads + s.kv_heads + kv()) * d; }
  T* out(T* o) const { return o + sequence * s.length * out_width() + head * d; }
  int out_width() const { return int(s.heads * s.head_dim); }
  T* probs(T* p) const { return p + (sequence * s.heads + head) * s.length * s.length; }
};

// Row i of `rows` sees the columns 0 to past + i.
template <class T>
static void softmax_rows(T* scores, int64_t rows, int64_t columns, int64_t past, T scale) {
  for (int64_t i = 0; i < rows; ++i) {
    T* row = scores + i * columns;
    int64_t last = past + i;
    T largest = row[0], sum = 0;
    for (int64_t j = 1; j <= last; ++j) largest = std::max(largest, row[j]);
    for (int64_t j = 0; j <= last; ++j) sum += row[j] = std::exp(scale * (row[j] - largest));
    for (int64_t j = 0; j <= last; ++j) row[j] /= sum;
    for (int64_t j = last + 1; j < columns; ++j) row[j] = 0;  // the future
  }
}

template <class T>
static void softmax_rows_backward(T* d_probs, const T* probs, int64_t length, T scale) {
  for (int64_t i = 0; i < length; ++i) {
    T *d = d_probs + i * length, dot = 0;
    const T* p = probs + i * length;
    for (int64_t j = 0; j <= i; ++j) dot += p[j] * d[j];
    for (int64_t j = 0; j < length; ++j) d[j] = j <= i ? scale * p[j] * (d[j] - dot) : T(0);
  }
}

template <class T>
static void attention_as(const Tensor& out, const Tensor& probs, const Tensor& qkv,
                         const AttentionShape& s) {
  T scale = T(1) / std::sqrt(T(s.head_dim));
  parallel(s.sequences * s.heads, s.length * s.length * s.head_dim, [&](int64_t i) {
    Head<T> h{s, i / s.heads, i % s.heads};
    T *x = qkv.data<T>(), *p = h.probs(probs.data<T>());
    gemm(Op::N, Op::T, h.length, h.length, h.d, h.q(x), h.width, h.k(x), h.width, T(0), p,
         h.length);
    softmax_rows(p, s.length, s.length, 0, scale);
    gemm(Op::N, Op::N, h.length, h.d, h.length, p, h.length, h.v(x), h.width, T(0),
         h.out(out.data<T>()), h.out_width());
  });
}

template <class T>
static void attention_backward_as(const Tensor& d_qkv, const Tensor& d_out, const Tensor& probs,
                                  const Tensor& qkv, const AttentionShape& s) {
  T scale = T(1) / std::sqrt(T(s.head_dim));
  int64_t group = s.heads / s.kv_heads;
  parallel(s.sequences * s.kv_heads, s.length * s.length * s.head_dim, [&](int64_t i) {
    std::vector<T> d_scores(size_t(s.length * s.length));
    T* ds = d_scores.data();
    for (int64_t g = 0; g < group; ++g) {
      Head<T> h{s, i / s.kv_heads, i % s.kv_heads * group + g};
      T *x = qkv.data<T>(), *dx = d_qkv.data<T>(), *p = h.probs(probs.data<T>());
      T *d_o = h.out(d_out.data<T>()), beta = g == 0 ? T(0) : T(1);  // query heads share k and v
      int n = h.length, d = h.d, w = h.width, ow = h.out_width();
      gemm(Op::T, Op::N, n, d, n, p, n, d_o, ow, beta, h.v(dx), w);
      gemm(Op::N, Op::T, n, n, d, d_o, ow, h.v(x), w, T(0), ds, n);
      softmax_rows_backward(ds, p, s.length, scale);
      gemm(Op::N, Op::N, n, d, n, ds, n, h.k(x), w, T(0), h.q(dx), w);
      gemm(Op::T, Op::N, n, d, n, ds, n, h.q(x), w, beta, h.k(dx), w);
    }
  });
}

static void attention(const Tensor& out, const Tensor& probs, const Tensor& qkv,
                      const AttentionShape& s) {
  Tensor x = widened(qkv), o = widened(out), p = widened(probs);
  x.dtype() == DType::F64 ? attention_as<double>(o, p, x, s) : attention_as<float>(o, p, x, s);
  if (out.dtype() == DType::BF16) {
    kernels(Device::CPU).cast(out, o);
    kernels(Device::CPU).cast(probs, p);
  }
}

static void attention_backward(const Tensor& d_qkv, const Tensor& d_out, const Tensor& probs,
                               const Tensor& qkv, const AttentionShape& s) {
  Tensor dx = widened(d_qkv), d_o = widened(d_out), p = widened(probs), x = widened(qkv);
  x.dtype() == DType::F64 ? attention_backward_as<double>(dx, d_o, p, x, s)
                          : attention_backward_as<float>(dx, d_o, p, x, s);
  if (d_qkv.dtype() == DType::BF16) kernels(Device::CPU).cast(d_qkv, dx);
}

// A head's rows in blocks, so that the scores of a long prompt never lie in memory all at once.
template <class T>
static void attention_cached_as(const Tensor& out, const Tensor& keys, const Tensor& values,
                                const Tensor& qkv, const AttentionShape& s, int64_t past) {
  constexpr int64_t kRows = 64;
  int64_t blocks = (s.length + kRows - 1) / kRows, group = s.heads / s.kv_heads;
  int d = int(s.head_dim), kv_width = int(s.kv_heads * s.head_dim);
  T scale = T(1) / std::sqrt(T(s.head_dim));
  parallel(s.heads * blocks, std::min(kRows, s.length) * (past + s.length) * d, [&](int64_t i) {
    int64_t head = i / blocks, first = i % blocks * kRows;
    int rows = int(std::min(kRows, s.length - first)), seen = int(past + first) + rows;
    std::vector<T> scores(size_t(rows) * size_t(seen));
    T *p = scores.data(), *q = qkv.data<T>() + first * s.columns() + head * d;
    T *k = keys.data<T>() + head / group * d, *v = values.data<T>() + head / group * d;
    gemm(Op::N, Op::T, rows, seen, d, q, int(s.columns()), k, kv_width, T(0), p, seen);
    softmax_rows(p, rows, seen, past + first, scale);
    int out_width = int(s.heads) * d;
    gemm(Op::N, Op::N, rows, d, seen, p, seen, v, kv_width, T(0),
         out.data<T>() + first * out_width + head * d, out_width);
  });
}

// Columns [column, column + width of to) of from's rows become to's rows past, past + 1, ...
static void remember(const Tensor& to, const Tensor& from, int64_t column, int64_t past) {
  int64_t bytes = int64_t(size_of(to.dtype())), width = to.dim(1) * bytes;
  int64_t stride = from.dim(1) * bytes;
  for (int64_t i = 0; i < from.dim(0); ++i)
    std::memcpy(to.raw() + (past + i) * width, from.raw() + i * stride + column * bytes,
                size_t(width));
}

static void attention_cached(const Tensor& out, const Tensor& keys, const Tensor& values,
                             const Tensor& qkv, const AttentionShape& s, int64_t past) {
  int64_t seen = past + s.length;
  require(s.sequences == 1 && seen <= keys.dim(0), "a cache of ", keys.dim(0), " rows cannot take ",
          s.sequences, " x ", s.length, " more behind ", past);
  remember(keys, qkv, s.heads * s.head_dim, past);
  remember(values, qkv, (s.heads + s.kv_heads) * s.head_dim, past);
  Tensor k = widened(keys.rows(0, seen)), v = widened(values.rows(0, seen));
  Tensor x = widened(qkv), o = widened(out);
  x.dtype() == DType::F64 ? attention_cached_as<double>(o, k, v, x, s, past)
                          : attention_cached_as<float>(o, k, v, x, s, past);
  if (out.dtype() == DType::BF16) kernels(Device::CPU).cast(out, o);
}

void add_attention(Kernels& k) {
  k.attention = attention;
  k.attention_backward = attention_backward;
  k.attention_cached = attention_cached;
}

}  // namespace lockstep::cpu
