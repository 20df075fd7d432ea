// RMSNorm, SwiGLU and RoPE, one kernel for each operation. See plain.h.

#include "08_kernels/each.h"
#include "08_kernels/plain.h"

namespace lockstep::plain {

using cuda::as;
using cuda::rounded;

template <class T>
void rmsnorm_steps(const Tensor& y, const Tensor& rstd, const Tensor& x, const Tensor& delta,
                   const Tensor& sum, const Tensor& gain, float eps) {
  int64_t rows = rstd.size(), width = gain.size(), n = rows * width;
  const T *in = as<T>(x), *d = as<T>(delta), *g = as<T>(gain);
  T* out = as<T>(y);
  float* r = as<float>(rstd);
  if (delta.defined()) {
    T* s = as<T>(sum);
    const T* a = in;
    each(n, [=] __device__(int64_t i) { s[i] = rounded<T>(float(a[i]) + float(d[i])); });
    in = s;
  }
  Tensor normed = y.like();
  T* middle = as<T>(normed);
  row_sums(r, rows, width, [=] __device__(int64_t row, int64_t j) {
    float value = in[row * width + j];
    return value * value;
  });
  each(rows, [=] __device__(int64_t row) { r[row] = 1 / sqrtf(r[row] / float(width) + eps); });
  each(n, [=] __device__(int64_t i) { middle[i] = rounded<T>(float(in[i]) * r[i / width]); });
  each(n,
       [=] __device__(int64_t i) { out[i] = rounded<T>(float(middle[i]) * float(g[i % width])); });
}

void rmsnorm(const Tensor& y, const Tensor& rstd, const Tensor& x, const Tensor& delta,
             const Tensor& sum, const Tensor& gain, float eps) {
  cuda::for_type(x.dtype(), [&](auto zero) {
    rmsnorm_steps<decltype(zero)>(y, rstd, x, delta, sum, gain, eps);
  });
}

// With n = x rstd: dx = rstd (dy gain - n mean(dy gain n)), + d_sum.
template <class T>
void rmsnorm_backward_steps(const Tensor& dx, const Tensor& dy, const Tensor& d_sum,
                            const Tensor& x, const Tensor& rstd, const Tensor& gain) {
  int64_t rows = rstd.size(), width = gain.size(), n = rows * width;
  Tensor scaled = dx.like(), normed = dx.like(), dots = rstd.like();
  const T *d = as<T>(dy), *in = as<T>(x), *g = as<T>(gain);
  const float* r = as<float>(rstd);
  T *dg = as<T>(scaled), *xr = as<T>(normed), *out = as<T>(dx);
  float* dot = as<float>(dots);
  each(n, [=] __device__(int64_t i) { dg[i] = rounded<T>(float(d[i]) * float(g[i % width])); });
  each(n, [=] __device__(int64_t i) { xr[i] = rounded<T>(float(in[i]) * r[i / width]); });
  row_sums(dot, rows, width, [=] __device__(int64_t row, int64_t j) {
    return float(dg[row * width + j]) * float(xr[row * width + j]);
  });
  each(n, [=] __device__(int64_t i) {
    float mean = dot[i / width] / float(width);
    out[i] = rounded<T>(r[i / width] * (float(dg[i]) - float(xr[i]) * mean));
  });
  if (!d_sum.defined()) return;
  const T* through = as<T>(d_sum);
  each(n, [=] __device__(int64_t i) { out[i] = rounded<T>(float(out[i]) + float(through[i])); });
}

void rmsnorm_backward(const Tensor& dx, const Tensor& dy, const Tensor& d_sum, const Tensor& x,
                      const Tensor& rstd, const Tensor& gain) {
  cuda::for_type(x.dtype(), [&](auto zero) {
    rmsnorm_backward_steps<decltype(zero)>(dx, dy, d_sum, x, rstd, gain);
  });
}

template <class T>
void swiglu_steps(const Tensor& out, const Tensor& gate_up) {
  int64_t width = out.dim(1), n = out.size();
  Tensor sigmoid = out.like();
  const T* in = as<T>(gate_up);
  T *s = as<T>(sigmoid), *y = as<T>(out);
  auto gate = [=] __device__(int64_t i) { return float(in[i / width * 2 * width + i % width]); };
  auto up = [=] __device__(int64_t i) {
    return float(in[i / width * 2 * width + width + i % width]);
  };
  each(n, [=] __device__(int64_t i) { s[i] = rounded<T>(1 / (1 + expf(-gate(i)))); });
  each(n, [=] __device__(int64_t i) { s[i] = rounded<T>(gate(i) * float(s[i])); });
  each(n, [=] __device__(int64_t i) { y[i] = rounded<T>(float(s[i]) * up(i)); });
}

void swiglu(const Tensor& out, const Tensor& gate_up) {
  cuda::for_type(out.dtype(), [&](auto zero) { swiglu_steps<decltype(zero)>(out, gate_up); });
}

// As Hugging Face's Llama says it: x cos + rotate_half(x) sin, with rotate_half(a|b) = -b|a.
template <class T>
void rope_steps(const Tensor& out, const Tensor& qkv, const Tensor& positions,
                const Tensor& inv_freq, const AttentionShape& s) {
  int64_t rows = positions.size(), width = s.columns(), n = rows * width, d = s.head_dim;
  int64_t turned = (s.heads + s.kv_heads) * d;
  Tensor cosines = Tensor::empty({rows, d / 2}, DType::F32, Device::CUDA), sines = cosines.like();
  Tensor rotated = qkv.like();
  float *cosine = as<float>(cosines), *sine = as<float>(sines);
  const float* frequency = as<float>(inv_freq);
  const int32_t* position = as<int32_t>(positions);
  const T* x = as<T>(qkv);
  T *half = as<T>(rotated), *y = as<T>(out);
  each(rows * d / 2, [=] __device__(int64_t i) {
    float angle = float(position[i / (d / 2)]) * frequency[i % (d / 2)];
    sincosf(angle, &sine[i], &cosine[i]);
  });
  auto angle_of = [=] __device__(int64_t i) { return i / width * (d / 2) + i % width % (d / 2); };
  each(n, [=] __device__(int64_t i) {
    int64_t j = i % width % d;
    half[i] = j < d / 2 ? rounded<T>(-float(x[i + d / 2])) : x[i - d / 2];
  });
  each(n, [=] __device__(int64_t i) {
    y[i] = i % width < turned ? rounded<T>(float(x[i]) * cosine[angle_of(i)]) : x[i];
  });
  each(n, [=] __device__(int64_t i) {
    if (i % width < turned) y[i] = rounded<T>(float(y[i]) + float(half[i]) * sine[angle_of(i)]);
  });
}

void rope(const Tensor& out, const Tensor& qkv, const Tensor& positions, const Tensor& inv_freq,
          const AttentionShape& shape) {
  cuda::for_type(qkv.dtype(), [&](auto zero) {
    rope_steps<decltype(zero)>(out, qkv, positions, inv_freq, shape);
  });
}

}  // namespace lockstep::plain
