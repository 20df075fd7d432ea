// The layers between the matrix products, on CUDA. All are bound by memory: each reads its inputs
// once and writes its outputs once. RMSNorm has a file of its own.

#include "common/kernels_cuda.h"

namespace lockstep::cuda {

// ---- Sums over rows, for the gradients of gains and biases ----
//
// First, block (x, y) sums its `rows_per_block` rows for its 32 packs of columns into row y of
// `partial`. Then one block for each 32 columns adds up the rows of `partial`. How many rows a
// block gets depends on the number of rows alone.

constexpr int kGroups = 8;  // warps of a block, each taking every 8th row

template <class T, bool Even, bool Norm>
__global__ void column_sums_kernel(float* partial, const T* dy, const T* x, const float* rstd,
                                   int64_t rows, int64_t width, int64_t rows_per_block) {
  constexpr int N = kPack<T>;
  int lane = threadIdx.x % 32, group = threadIdx.x / 32;
  int64_t begin = int64_t(blockIdx.x) * 32 * N, j = begin + lane * N;
  int64_t first = blockIdx.y * rows_per_block, last = min(first + rows_per_block, rows);
  float sum[N] = {};
  if (j < width) {
#pragma unroll 4
    for (int64_t t = first + group; t < last; t += kGroups) {
      Pack<T, N> d = load<Even, N>(dy + t * width + j, width - j);
      if constexpr (Norm) {
        Pack<T, N> in = load<Even, N>(x + t * width + j, width - j);
        float r = rstd[t];
        for (int k = 0; k < N; ++k) sum[k] += float(d.at[k]) * float(in.at[k]) * r;
      } else {
        for (int k = 0; k < N; ++k) sum[k] += float(d.at[k]);
      }
    }
  }
  __shared__ float of_group[kGroups][32 * N];
  for (int k = 0; k < N; ++k) of_group[group][lane * N + k] = sum[k];
  __syncthreads();
  for (int c = threadIdx.x; c < 32 * N && begin + c < width; c += blockDim.x) {
    float total = 0;
    for (int g = 0; g < kGroups; ++g) total += of_group[g][c];
    partial[blockIdx.y * width + begin + c] = total;
  }
}

template <class G>
__global__ void __launch_bounds__(1024)
    add_partial_rows_kernel(G* grad, const float* partial, int64_t rows, int64_t width) {
  int lane = threadIdx.x % 32, group = threadIdx.x / 32;
  int64_t j = int64_t(blockIdx.x) * 32 + lane;
  float sum = 0;
  if (j < width) {
#pragma unroll 8
    for (int64_t t = group; t < rows; t += 32) sum += partial[t * width + j];
  }
  __shared__ float of_group[32][32];
  of_group[group][lane] = sum;
  __syncthreads();
  if (group == 0 && j < width) {
    float total = 0;
    for (int g = 0; g < 32; ++g) total += of_group[g][lane];
    grad[j] = rounded<G>(float(grad[j]) + total);
  }
}

// grad [width] += sum over rows of dy, or of dy * x * rstd where x is given.
static void add_columns(const Tensor& grad, const Tensor& dy, const Tensor& x, const Tensor& rstd,
                        int64_t rows) {
  int64_t width = grad.size();
  if (rows == 0 || width == 0) return;
  int64_t rows_per_block = std::max<int64_t>(64, ceil_div(rows, 256));
  int64_t blocks = ceil_div(rows, rows_per_block);
  Tensor partial = Tensor::empty({blocks, width}, DType::F32, Device::CUDA, Category::Buffers);
  for_type(dy.dtype(), [&](auto zero) {
    using T = decltype(zero);
    constexpr int N = kPack<T>;
    branch(is_even(N, width, dy, x), [&](auto even) {
      branch(x.defined(), [&](auto norm) {
        launch(column_sums_kernel<T, even(), norm()>,
               {ceil_div(width, 32 * N), blocks, 32 * kGroups}, as<float>(partial), as<T>(dy),
               as<T>(x), as<float>(rstd), rows, width, rows_per_block);
      });
    });
  });
  for_type(grad.dtype(), [&](auto zero) {
    using G = decltype(zero);
    launch(add_partial_rows_kernel<G>, {ceil_div(width, 32), 1, 1024}, as<G>(grad),
           as<float>(partial), blocks, width);
  });
}

static void rmsnorm_gain_backward(const Tensor& d_gain, const Tensor& dy, const Tensor& x,
                                  const Tensor& rstd) {
  int64_t n = rstd.size() * d_gain.size();
  expect("d_gain", d_gain, d_gain.size(), d_gain.dtype());
  expect("dy", dy, n, dy.dtype());
  expect("x", x, n, dy.dtype());
  expect("rstd", rstd, rstd.size(), DType::F32);
  add_columns(d_gain, dy, x, rstd, rstd.size());
}

static void bias_backward(const Tensor& d_bias, const Tensor& dy) {
  int64_t rows = dy.dim(0);
  expect("d_bias", d_bias, d_bias.size(), d_bias.dtype());
  expect("dy", dy, rows * d_bias.size(), dy.dtype());
  add_columns(d_bias, dy, Tensor(), Tensor(), rows);
}

template <class T, bool Even>
__global__ void add_bias_kernel(T* y, const T* bias, int64_t width) {
  constexpr int N = kPack<T>;
  int64_t j = column<N>();
  if (j >= width) return;
  T* at = y + blockIdx.x * width + j;
  Pack<T, N> sum = load<Even, N>(at, width - j), b = load<Even, N>(bias + j, width - j);
  for (int k = 0; k < N; ++k) sum.at[k] = rounded<T>(float(sum.at[k]) + float(b.at[k]));
  store<Even>(at, width - j, sum);
}

static void add_bias(const Tensor& y, const Tensor& bias) {
  int64_t rows = y.dim(0), width = bias.size();
  expect("y", y, rows * width, y.dtype());
  expect("bias", bias, width, y.dtype());
  for_type(y.dtype(), [&](auto zero) {
    using T = decltype(zero);
    branch(is_even(kPack<T>, width, y, bias), [&](auto even) {
      launch(add_bias_kernel<T, even()>, row_grid(rows, width, kPack<T>), as<T>(y), as<T>(bias),
             width);
    });
  });
}

// ---- RoPE: one block per row; its cosines and sines serve all heads ----

constexpr int kMaxHalf = 512;  // half of the largest head

template <class T, bool Even>
__global__ void rope_kernel(T* out, const T* qkv, const int32_t* positions, const float* inv_freq,
                            int half, int turned_heads, int heads, float direction) {
  constexpr int N = kPack<T>;
  __shared__ float cosine[kMaxHalf], sine[kMaxHalf];
  for (int i = threadIdx.x; i < half; i += blockDim.x) {
    sincosf(float(positions[blockIdx.x]) * inv_freq[i], &sine[i], &cosine[i]);
    sine[i] *= direction;
  }
  __syncthreads();
  int packs = (half + N - 1) / N;  // of each half of a head
  int64_t row = int64_t(blockIdx.x) * heads * 2 * half;
#pragma unroll 2
  for (int p = threadIdx.x; p < packs * heads; p += blockDim.x) {
    int head = p / packs, i = p % packs * N;
    int64_t left = half - i, first = row + int64_t(head) * 2 * half + i, second = first + half;
    Pack<T, N> a = load<Even, N>(qkv + first, left), b = load<Even, N>(qkv + second, left);
    for (int k = 0; k < N && i + k < half && head < turned_heads; ++k) {
      float u = a.at[k], v = b.at[k], c = cosine[i + k], s = sine[i + k];
      a.at[k] = rounded<T>(u * c - v * s);
      b.at[k] = rounded<T>(v * c + u * s);
    }
    store<Even>(out + first, left, a);
    store<Even>(out + second, left, b);
  }
}

static void rope(const Tensor& out, const Tensor& qkv, const Tensor& positions,
                 const Tensor& inv_freq, const AttentionShape& s, bool inverse) {
  int64_t rows = positions.size(), half = s.head_dim / 2, heads = s.heads + 2 * s.kv_heads;
  require(s.head_dim % 2 == 0 && half <= kMaxHalf && s.columns() <= INT32_MAX,
          "RoPE turns heads of an even size up to ", 2 * kMaxHalf, ", not ", s.head_dim);
  expect("qkv", qkv, rows * s.columns(), qkv.dtype());
  expect("out", out, qkv.size(), qkv.dtype());
  expect("positions", positions, rows, DType::I32);
  expect("inv_freq", inv_freq, half, DType::F32);
  if (qkv.size() == 0) return;
  for_type(qkv.dtype(), [&](auto zero) {
    using T = decltype(zero);
    int64_t packs = ceil_div(half, kPack<T>) * heads;
    branch(is_even(kPack<T>, half, out, qkv), [&](auto even) {
      // No more threads than share the packs evenly: an idle half of a block keeps others out.
      int threads = round_to_warps(ceil_div(packs, ceil_div(packs, 192)));
      launch(rope_kernel<T, even()>, {rows, 1, threads}, as<T>(out), as<T>(qkv),
             as<int32_t>(positions), as<float>(inv_freq), int(half), int(s.heads + s.kv_heads),
             int(heads), inverse ? -1.0f : 1.0f);
    });
  });
}

// ---- SwiGLU ----

// The quick exponential and division are exact to about 1e-6, and right at both ends: 1 / inf = 0.
__device__ static float sigmoid(float x) { return __fdividef(1, 1 + quick_exp(-x)); }

template <class T, bool Even>
__global__ void swiglu_kernel(T* out, const T* gate_up, int64_t width) {
  constexpr int N = kPack<T>;
  int64_t j = column<N>(), t = blockIdx.x;
  if (j >= width) return;
  const T* gate = gate_up + t * 2 * width + j;
  Pack<T, N> g = load<Even, N>(gate, width - j), u = load<Even, N>(gate + width, width - j);
  for (int k = 0; k < N; ++k) {
    float x = g.at[k];
    u.at[k] = rounded<T>(x * sigmoid(x) * float(u.at[k]));
  }
  store<Even>(out + t * width + j, width - j, u);
}

// silu(g) = g s with s = sigmoid(g), so silu'(g) = s (1 + g (1 - s)).
template <class T, bool Even>
__global__ void swiglu_backward_kernel(T* d_gate_up, const T* d_out, const T* gate_up,
                                       int64_t width) {
  constexpr int N = kPack<T>;
  int64_t j = column<N>(), t = blockIdx.x, at = t * 2 * width + j;
  if (j >= width) return;
  Pack<T, N> g = load<Even, N>(gate_up + at, width - j);
  Pack<T, N> u = load<Even, N>(gate_up + at + width, width - j);
  Pack<T, N> d = load<Even, N>(d_out + t * width + j, width - j);
  for (int k = 0; k < N; ++k) {
    float x = g.at[k], s = sigmoid(x), dk = d.at[k];
    g.at[k] = rounded<T>(dk * float(u.at[k]) * s * (1 + x * (1 - s)));
    u.at[k] = rounded<T>(dk * x * s);
  }
  store<Even>(d_gate_up + at, width - j, g);
  store<Even>(d_gate_up + at + width, width - j, u);
}

static void swiglu(const Tensor& out, const Tensor& gate_up) {
  int64_t rows = out.dim(0), width = out.dim(1);
  expect("out", out, rows * width, gate_up.dtype());
  expect("gate_up", gate_up, rows * 2 * width, gate_up.dtype());
  for_type(out.dtype(), [&](auto zero) {
    using T = decltype(zero);
    branch(is_even(kPack<T>, width, out, gate_up), [&](auto even) {
      launch(swiglu_kernel<T, even()>, row_grid(rows, width, kPack<T>), as<T>(out), as<T>(gate_up),
             width);
    });
  });
}

static void swiglu_backward(const Tensor& d_gate_up, const Tensor& d_out, const Tensor& gate_up) {
  int64_t rows = d_out.dim(0), width = d_out.dim(1);
  expect("d_out", d_out, rows * width, gate_up.dtype());
  expect("gate_up", gate_up, rows * 2 * width, gate_up.dtype());
  expect("d_gate_up", d_gate_up, gate_up.size(), gate_up.dtype());
  for_type(d_out.dtype(), [&](auto zero) {
    using T = decltype(zero);
    branch(is_even(kPack<T>, width, d_gate_up, d_out, gate_up), [&](auto even) {
      launch(swiglu_backward_kernel<T, even()>, row_grid(rows, width, kPack<T>), as<T>(d_gate_up),
             as<T>(d_out), as<T>(gate_up), width);
    });
  });
}

void add_layers(Kernels& k) {
  k.rmsnorm_gain_backward = rmsnorm_gain_backward;
  k.rope = rope;
  k.swiglu = swiglu;
  k.swiglu_backward = swiglu_backward;
  k.add_bias = add_bias;
  k.bias_backward = bias_backward;
}

}  // namespace lockstep::cuda
