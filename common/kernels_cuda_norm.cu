// RMSNorm on CUDA: one block per row. A row is needed twice, for the sum over its squares and to be
// scaled by the result; in between it stays in registers, so that memory is read once. For the same
// reason the residual addition before the norm happens here.

#include "common/kernels_cuda.h"

namespace lockstep::cuda {

constexpr int kRowThreads = 512, kRowPacks = 8;

// Thread's i-th pack of the row.
template <int N>
__device__ int64_t row_column(int i) {
  return (int64_t(i) * blockDim.x + threadIdx.x) * N;
}

template <class T, bool Even, int Packs>
__global__ void __launch_bounds__(kRowThreads)
    rmsnorm_kernel(T* y, float* rstd, const T* x, const T* delta, T* sum, const T* gain, float eps,
                   int64_t width) {
  constexpr int N = kPack<T>;
  int64_t row = blockIdx.x * width;
  Pack<T, N> kept[Packs], added[Packs];
#pragma unroll
  for (int i = 0; i < Packs; ++i) {  // all loads before the first use: they travel together
    int64_t j = row_column<N>(i);
    if (j < width) kept[i] = load<Even, N>(x + row + j, width - j);
    if (j < width && delta) added[i] = load<Even, N>(delta + row + j, width - j);
  }
  float squares = 0;
#pragma unroll
  for (int i = 0; i < Packs; ++i) {
    int64_t j = row_column<N>(i);
    if (j >= width) continue;
    if (delta) {
      for (int k = 0; k < N; ++k)
        kept[i].at[k] = rounded<T>(float(kept[i].at[k]) + float(added[i].at[k]));
      store<Even>(sum + row + j, width - j, kept[i]);
    }
    for (int k = 0; k < N; ++k) squares += float(kept[i].at[k]) * float(kept[i].at[k]);
  }
  float r = 1 / sqrtf(block_sum(squares) / float(width) + eps);
  if (threadIdx.x == 0) rstd[blockIdx.x] = r;
#pragma unroll
  for (int i = 0; i < Packs; ++i) {
    int64_t j = row_column<N>(i);
    if (j >= width) continue;
    Pack<T, N> g = load<Even, N>(gain + j, width - j);
    for (int k = 0; k < N; ++k) g.at[k] = rounded<T>(float(kept[i].at[k]) * r * float(g.at[k]));
    store<Even>(y + row + j, width - j, g);
  }
}

// With n_j = x_j r the normalised row: dx_j = r (dy_j g_j - n_j mean_i(dy_i g_i n_i)).
template <class T, bool Even, int Packs>
__global__ void __launch_bounds__(kRowThreads)
    rmsnorm_backward_kernel(T* dx, const T* dy, const T* d_sum, const T* x, const float* rstd,
                            const T* gain, int64_t width) {
  constexpr int N = kPack<T>;
  int64_t row = blockIdx.x * width;
  constexpr bool kAll = Packs < kRowPacks;  // do the registers hold all three tensors' row?
  Pack<T, N> d[Packs], in[Packs], through[Packs]{};
  float r = rstd[blockIdx.x];
#pragma unroll
  for (int i = 0; i < Packs; ++i) {  // all loads before the first use
    int64_t j = row_column<N>(i);
    if (j >= width) continue;
    d[i] = load<Even, N>(dy + row + j, width - j);
    in[i] = load<Even, N>(x + row + j, width - j);
    if (kAll && d_sum) through[i] = load<Even, N>(d_sum + row + j, width - j);
  }
  float dot = 0;
#pragma unroll
  for (int i = 0; i < Packs; ++i) {
    int64_t j = row_column<N>(i);
    if (j >= width) continue;
    Pack<T, N> g = load<Even, N>(gain + j, width - j);
    for (int k = 0; k < N; ++k) dot += float(d[i].at[k]) * float(g.at[k]) * float(in[i].at[k]);
  }
  float mean = block_sum(dot) * r / float(width);
#pragma unroll
  for (int i = 0; i < Packs; ++i) {
    int64_t j = row_column<N>(i);
    if (j >= width) continue;
    Pack<T, N> g = load<Even, N>(gain + j, width - j), add = through[i];
    if (!kAll && d_sum) add = load<Even, N>(d_sum + row + j, width - j);
    for (int k = 0; k < N; ++k) {
      float value = r * (float(d[i].at[k]) * float(g.at[k]) - float(in[i].at[k]) * r * mean);
      g.at[k] = rounded<T>(value + float(add.at[k]));
    }
    store<Even>(dx + row + j, width - j, g);
  }
}

// Calls f(packs per thread, threads per block) with the fewest packs, from `fewest` on, that hold a
// row. Every pack is a load under way: one where there are two or three tensors to load, two where
// there is only x.
template <class T, class F>
static void with_row_plan(int64_t width, int fewest, F&& f) {
  int64_t packs = ceil_div(width, kPack<T>);
  require(width > 0 && packs <= kRowThreads * kRowPacks, "RMSNorm of rows of ", width,
          " elements; 1 to ", kRowThreads * kRowPacks * kPack<T>, " fit into registers");
  auto with = [&](auto per_thread) {
    f(per_thread, round_to_warps(ceil_div(packs, per_thread())));
  };
  if (packs <= kRowThreads && fewest == 1) return with(std::integral_constant<int, 1>{});
  if (packs <= kRowThreads * 2) return with(std::integral_constant<int, 2>{});
  if (packs <= kRowThreads * 4) return with(std::integral_constant<int, 4>{});
  with(std::integral_constant<int, kRowPacks>{});
}

static void rmsnorm(const Tensor& y, const Tensor& rstd, const Tensor& x, const Tensor& delta,
                    const Tensor& sum, const Tensor& gain, float eps) {
  int64_t rows = rstd.size(), width = gain.size(), n = rows * width;
  expect("x", x, n, x.dtype());
  expect("y", y, n, x.dtype());
  expect("rstd", rstd, rows, DType::F32);
  expect("gain", gain, width, x.dtype());
  if (delta.defined()) {
    expect("delta", delta, n, x.dtype());
    expect("sum", sum, n, x.dtype());
  }
  for_type(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    branch(is_even(kPack<T>, width, y, x, delta, sum, gain), [&](auto even) {
      with_row_plan<T>(width, delta.defined() ? 1 : 2, [&](auto packs, int threads) {
        launch(rmsnorm_kernel<T, even(), packs()>, {rows, 1, threads}, as<T>(y), as<float>(rstd),
               as<T>(x), as<T>(delta), as<T>(sum), as<T>(gain), eps, width);
      });
    });
  });
}

static void rmsnorm_backward(const Tensor& dx, const Tensor& dy, const Tensor& d_sum,
                             const Tensor& x, const Tensor& rstd, const Tensor& gain) {
  int64_t rows = rstd.size(), width = gain.size(), n = rows * width;
  expect("x", x, n, x.dtype());
  expect("dx", dx, n, x.dtype());
  expect("dy", dy, n, x.dtype());
  expect("rstd", rstd, rows, DType::F32);
  expect("gain", gain, width, x.dtype());
  if (d_sum.defined()) expect("d_sum", d_sum, n, x.dtype());
  for_type(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    branch(is_even(kPack<T>, width, dx, dy, d_sum, x, gain), [&](auto even) {
      with_row_plan<T>(width, 1, [&](auto packs, int threads) {
        launch(rmsnorm_backward_kernel<T, even(), packs()>, {rows, 1, threads}, as<T>(dx),
               as<T>(dy), as<T>(d_sum), as<T>(x), as<float>(rstd), as<T>(gain), width);
      });
    });
  });
}

void add_norm(Kernels& k) {
  k.rmsnorm = rmsnorm;
  k.rmsnorm_backward = rmsnorm_backward;
}

}  // namespace lockstep::cuda
