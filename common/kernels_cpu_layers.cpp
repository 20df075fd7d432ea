// The layers between the matrix products, on the CPU: plain loops over rows. T is the type in
// memory, Sum the type of the arithmetic.

#include <cmath>

#include "common/kernels_cpu.h"

namespace lockstep::cpu {

static void embedding(const Tensor& out, const Tensor& table, const Tensor& ids, int64_t first) {
  int64_t width = table.dim(1), rows = table.dim(0);
  with_type(out.dtype(), [&](auto zero) {
    using T = decltype(zero);
    parallel(ids.size(), width, [&](int64_t t) {
      int64_t row = ids.data<int32_t>()[t] - first;
      bool here = row >= 0 && row < rows;
      const T* from = table.data<T>() + (here ? row : 0) * width;
      T* to = out.data<T>() + t * width;
      for (int64_t j = 0; j < width; ++j) to[j] = here ? from[j] : zero;
    });
  });
}

// Threads share columns, not rows: each adds the rows of equal ids in the order of t.
template <class G, class T>
static void embedding_backward_as(const Tensor& d_table, const Tensor& d_out, const Tensor& ids,
                                  int64_t first) {
  using Sum = typename SumOf<G>::type;
  int64_t width = d_table.dim(1), rows = d_table.dim(0);
  constexpr int64_t kColumns = 16;
  parallel((width + kColumns - 1) / kColumns, ids.size() * kColumns, [&](int64_t block) {
    int64_t begin = block * kColumns, end = std::min(width, begin + kColumns);
    for (int64_t t = 0; t < ids.size(); ++t) {
      int64_t row = ids.data<int32_t>()[t] - first;
      if (row < 0 || row >= rows) continue;
      G* to = d_table.data<G>() + row * width;
      const T* from = d_out.data<T>() + t * width;
      for (int64_t j = begin; j < end; ++j) to[j] = G(Sum(to[j]) + Sum(from[j]));
    }
  });
}

static void embedding_backward(const Tensor& d_table, const Tensor& d_out, const Tensor& ids,
                               int64_t first) {
  with_type(d_out.dtype(), [&](auto zero) {
    using T = decltype(zero);
    if (d_table.dtype() != DType::BF16) {
      using Sum = typename SumOf<T>::type;
      return embedding_backward_as<Sum, T>(d_table, d_out, ids, first);
    }
    // 16-bit gradients: sum this batch in fp32 first, or small addends would be lost on the way
    Tensor sum = Tensor::zeros(d_table.shape(), DType::F32, Device::CPU, Category::Buffers);
    embedding_backward_as<float, T>(sum, d_out, ids, first);
    kernels(Device::CPU).add_into(d_table, sum);
  });
}

static void rmsnorm(const Tensor& y, const Tensor& rstd, const Tensor& x, const Tensor& delta,
                    const Tensor& sum, const Tensor& gain, float eps) {
  int64_t width = gain.size();
  with_type(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    using Sum = typename SumOf<T>::type;
    parallel(rstd.size(), 4 * width, [&](int64_t t) {
      const T *in = x.data<T>() + t * width, *g = gain.data<T>();
      if (delta.defined()) {
        const T* d = delta.data<T>() + t * width;
        T* s = sum.data<T>() + t * width;
        for (int64_t j = 0; j < width; ++j) s[j] = T(Sum(in[j]) + Sum(d[j]));
        in = s;
      }
      Sum squares = 0;
      for (int64_t j = 0; j < width; ++j) squares += Sum(in[j]) * Sum(in[j]);
      Sum r = 1 / std::sqrt(squares / Sum(width) + Sum(eps));
      rstd.data<Sum>()[t] = r;
      T* out = y.data<T>() + t * width;
      for (int64_t j = 0; j < width; ++j) out[j] = T(Sum(in[j]) * r * Sum(g[j]));
    });
  });
}

// With n_j = x_j r the normalised row: dx_j = r (dy_j g_j - n_j mean_i(dy_i g_i n_i)).
static void rmsnorm_backward(const Tensor& dx, const Tensor& dy, const Tensor& d_sum,
                             const Tensor& x, const Tensor& rstd, const Tensor& gain) {
  int64_t width = gain.size();
  with_type(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    using Sum = typename SumOf<T>::type;
    parallel(rstd.size(), 6 * width, [&](int64_t t) {
      const T *in = x.data<T>() + t * width, *d = dy.data<T>() + t * width, *g = gain.data<T>();
      const T* through = d_sum.defined() ? d_sum.data<T>() + t * width : nullptr;
      Sum r = rstd.data<Sum>()[t], dot = 0;
      for (int64_t j = 0; j < width; ++j) dot += Sum(d[j]) * Sum(g[j]) * Sum(in[j]);
      Sum mean = dot * r / Sum(width);
      T* out = dx.data<T>() + t * width;
      for (int64_t j = 0; j < width; ++j) {
        Sum value = r * (Sum(d[j]) * Sum(g[j]) - Sum(in[j]) * r * mean);
        out[j] = T(through ? value + Sum(through[j]) : value);
      }
    });
  });
}

// Adds term(t, j) over all rows t to column j of a gradient, in the order of t.
template <class Sum, class Term>
static void add_columns(const Tensor& grad, int64_t rows, Term&& term) {
  constexpr int64_t kColumns = 64;
  int64_t width = grad.size();
  parallel((width + kColumns - 1) / kColumns, rows * kColumns, [&](int64_t block) {
    int64_t begin = block * kColumns, n = std::min(width - begin, kColumns);
    Sum sums[kColumns] = {};
    for (int64_t t = 0; t < rows; ++t)
      for (int64_t j = 0; j < n; ++j) sums[j] += term(t, begin + j);
    with_type(grad.dtype(), [&](auto zero) {
      using G = decltype(zero);
      G* g = grad.data<G>() + begin;
      for (int64_t j = 0; j < n; ++j) g[j] = G(Sum(g[j]) + sums[j]);
    });
  });
}

static void rmsnorm_gain_backward(const Tensor& d_gain, const Tensor& dy, const Tensor& x,
                                  const Tensor& rstd) {
  int64_t width = d_gain.size();
  with_type(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    using Sum = typename SumOf<T>::type;
    const T *d = dy.data<T>(), *in = x.data<T>();
    const Sum* r = rstd.data<Sum>();
    add_columns<Sum>(d_gain, rstd.size(), [=](int64_t t, int64_t j) {
      return Sum(d[t * width + j]) * Sum(in[t * width + j]) * r[t];
    });
  });
}

static void rope(const Tensor& out, const Tensor& qkv, const Tensor& positions,
                 const Tensor& inv_freq, const AttentionShape& s, bool inverse) {
  with_type(qkv.dtype(), [&](auto zero) {
    using T = decltype(zero);
    using Sum = typename SumOf<T>::type;
    int64_t half = s.head_dim / 2, width = s.columns(), turned = s.heads + s.kv_heads;
    const Sum* frequency = inv_freq.data<Sum>();
    parallel(positions.size(), 4 * width, [&](int64_t t) {
      Sum position = Sum(positions.data<int32_t>()[t]);
      const T* in = qkv.data<T>() + t * width;
      T* to = out.data<T>() + t * width;
      for (int64_t i = 0; i < half; ++i) {
        Sum angle = position * frequency[i];
        Sum c = std::cos(angle), n = inverse ? -std::sin(angle) : std::sin(angle);
        for (int64_t h = 0; h < turned; ++h) {
          int64_t a = h * s.head_dim + i, b = a + half;
          Sum first = Sum(in[a]), second = Sum(in[b]);
          to[a] = T(first * c - second * n);
          to[b] = T(second * c + first * n);
        }
      }
      std::copy(in + turned * s.head_dim, in + width, to + turned * s.head_dim);
    });
  });
}

template <class Sum>
static Sum sigmoid(Sum x) {
  return 1 / (1 + std::exp(-x));
}

static void swiglu(const Tensor& out, const Tensor& gate_up) {
  int64_t width = out.dim(1);
  with_type(out.dtype(), [&](auto zero) {
    using T = decltype(zero);
    using Sum = typename SumOf<T>::type;
    parallel(out.dim(0), 8 * width, [&](int64_t t) {
      const T *gate = gate_up.data<T>() + t * 2 * width, *up = gate + width;
      T* to = out.data<T>() + t * width;
      for (int64_t j = 0; j < width; ++j) {
        Sum g = Sum(gate[j]);
        to[j] = T(g * sigmoid(g) * Sum(up[j]));
      }
    });
  });
}

// silu(g) = g s with s = sigmoid(g), so silu'(g) = s (1 + g (1 - s)).
static void swiglu_backward(const Tensor& d_gate_up, const Tensor& d_out, const Tensor& gate_up) {
  int64_t width = d_out.dim(1);
  with_type(d_out.dtype(), [&](auto zero) {
    using T = decltype(zero);
    using Sum = typename SumOf<T>::type;
    parallel(d_out.dim(0), 12 * width, [&](int64_t t) {
      const T *gate = gate_up.data<T>() + t * 2 * width, *up = gate + width;
      const T* d = d_out.data<T>() + t * width;
      T *d_gate = d_gate_up.data<T>() + t * 2 * width, *d_up = d_gate + width;
      for (int64_t j = 0; j < width; ++j) {
        Sum g = Sum(gate[j]), s = sigmoid(g);
        d_gate[j] = T(Sum(d[j]) * Sum(up[j]) * s * (1 + g * (1 - s)));
        d_up[j] = T(Sum(d[j]) * g * s);
      }
    });
  });
}

static void add_bias(const Tensor& y, const Tensor& bias) {
  int64_t width = bias.size();
  with_type(y.dtype(), [&](auto zero) {
    using T = decltype(zero);
    using Sum = typename SumOf<T>::type;
    const T* b = bias.data<T>();
    parallel(y.dim(0), width, [&](int64_t t) {
      T* row = y.data<T>() + t * width;
      for (int64_t j = 0; j < width; ++j) row[j] = T(Sum(row[j]) + Sum(b[j]));
    });
  });
}

static void bias_backward(const Tensor& d_bias, const Tensor& dy) {
  int64_t width = d_bias.size();
  with_type(dy.dtype(), [&](auto zero) {
    using T = decltype(zero);
    using Sum = typename SumOf<T>::type;
    const T* d = dy.data<T>();
    add_columns<Sum>(d_bias, dy.dim(0),
                     [=](int64_t t, int64_t j) { return Sum(d[t * width + j]); });
  });
}

void add_layers(Kernels& k) {
  k.embedding = embedding;
  k.embedding_backward = embedding_backward;
  k.rmsnorm = rmsnorm;
  k.rmsnorm_backward = rmsnorm_backward;
  k.rmsnorm_gain_backward = rmsnorm_gain_backward;
  k.rope = rope;
  k.swiglu = swiglu;
  k.swiglu_backward = swiglu_backward;
  k.add_bias = add_bias;
  k.bias_backward = bias_backward;
}

}  // namespace lockstep::cpu
