// RMSNorm on CUDA: one block per row. A row is needed twice, for the sum over its squares and to be
// scaled by the result; in between it stays in registers, so that memory is read once. For the same
// reason the residual addition before the norm happens here.

#include "common/kernels_cuda.h"

namespace lockstep::cuda {

constexpr int kRowThreads = 512, kRowPacks = 8;
// Do the registers hold a row of every tensor, or does what is needed last have to wait?
template <int Packs>
constexpr bool kHoldsAll = Packs < kRowPacks;

// Thread's i-th pack of the row; it may lie behind the row's end.
template <int N>
__device__ int row_column(int i) {
  return int(i * blockDim.x + threadIdx.x) * N;
}
// A pack that is not there is loaded all the same, from the row's begin, and not used: around a
// branch the compiler would take each pack apart before it loads the next one.
template <bool Even, int N, class T>
__device__ Pack<T, N> load_any(const T* row, int j, int width) {
  return load<Even, N>(row + (j < width ? j : 0), j < width ? width - j : 0);
}

// block_sum() for kernels that need one sum only: it does not wait until it could be called again,
// and a row has so few warps that every thread may add up their sums itself.
__device__ float only_sum(float value) {
  __shared__ float of_warp[kRowThreads / 32];
  for (int step = 16; step > 0; step /= 2) value += __shfl_xor_sync(0xffffffffu, value, step);
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  value = 0;
#pragma unroll 4
  for (int warp = 0; warp < blockDim.x / 32; ++warp) value += of_warp[warp];
  return value;
}

template <class T, bool Even, int Packs, bool Adds>
__global__ void __launch_bounds__(kRowThreads)
    rmsnorm_kernel(T* y, float* rstd, const T* x, const T* delta, T* sum, const T* gain, float eps,
                   int width) {
  constexpr int N = kPack<T>;
  int64_t row = int64_t(blockIdx.x) * width;
  Pack<T, N> kept[Packs], added[Packs], g[Packs];
#pragma unroll
  for (int i = 0; i < Packs; ++i) {  // all loads before the first use: they travel together
    int j = row_column<N>(i);
    kept[i] = load_any<Even, N>(x + row, j, width);
    if (Adds) added[i] = load_any<Even, N>(delta + row, j, width);
    if (kHoldsAll<Packs>) g[i] = load_any<Even, N>(gain, j, width);
  }
  float squares = 0;
#pragma unroll
  for (int i = 0; i < Packs; ++i) {
    int j = row_column<N>(i);
    if (j >= width) continue;
    if (Adds) {
      for (int k = 0; k < N; ++k)
        kept[i].at[k] = rounded<T>(float(kept[i].at[k]) + float(added[i].at[k]));
      store<Even>(sum + row + j, width - j, kept[i]);
    }
    for (int k = 0; k < N; ++k) squares += float(kept[i].at[k]) * float(kept[i].at[k]);
  }
  float r = 1 / sqrtf(only_sum(squares) / float(width) + eps);
  if (threadIdx.x == 0) rstd[blockIdx.x] = r;
#pragma unroll
  for (int i = 0; i < Packs; ++i) {
    int j = row_column<N>(i);
    if (j >= width) continue;
    if (!kHoldsAll<Packs>) g[i] = load<Even, N>(gain + j, width - j);
    for (int k = 0; k < N; ++k)
      g[i].at[k] = rounded<T>(float(kept[i].at[k]) * r * float(g[i].at[k]));
    store<Even>(y + row + j, width - j, g[i]);
  }
}

// With n_j = x_j r the normalised row: dx_j = r (dy_j g_j - n_j mean_i(dy_i g_i n_i)).
template <class T, bool Even, int Packs, bool Adds>
__global__ void __launch_bounds__(kRowThreads)
    rmsnorm_backward_kernel(T* dx, const T* dy, const T* d_sum, const T* x, const float* rstd,
                            const T* gain, int width) {
  constexpr int N = kPack<T>;
  int64_t row = int64_t(blockIdx.x) * width;
  Pack<T, N> d[Packs], in[Packs], through[Packs]{};
  float r = rstd[blockIdx.x];
#pragma unroll
  for (int i = 0; i < Packs; ++i) {  // all loads before the first use
    int j = row_column<N>(i);
    d[i] = load_any<Even, N>(dy + row, j, width);
    in[i] = load_any<Even, N>(x + row, j, width);
    if (Adds && kHoldsAll<Packs>) through[i] = load_any<Even, N>(d_sum + row, j, width);
  }
  float dot = 0;
#pragma unroll
  for (int i = 0; i < Packs; ++i) {
    int j = row_column<N>(i);
    if (j >= width) continue;
    Pack<T, N> g = load<Even, N>(gain + j, width - j);
    for (int k = 0; k < N; ++k) dot += float(d[i].at[k]) * float(g.at[k]) * float(in[i].at[k]);
  }
  float mean = only_sum(dot) * r / float(width);
#pragma unroll
  for (int i = 0; i < Packs; ++i) {
    int j = row_column<N>(i);
    if (j >= width) continue;
    if (Adds && !kHoldsAll<Packs>) through[i] = load<Even, N>(d_sum + row + j, width - j);
    Pack<T, N> g = load<Even, N>(gain + j, width - j);
    for (int k = 0; k < N; ++k) {
      float value = r * (float(d[i].at[k]) * float(g.at[k]) - float(in[i].at[k]) * r * mean);
      g.at[k] = rounded<T>(value + float(through[i].at[k]));
    }
    store<Even>(dx + row + j, width - j, g);
  }
}

// Calls f(packs per thread, threads per block). Every pack is a load under way, and two of them are
// as much as leaves room for several rows on a multiprocessor; but a row should have some warps.
template <class T, class F>
static void with_row_plan(int64_t width, F&& f) {
  int64_t packs = ceil_div(width, kPack<T>);
  require(width > 0 && packs <= kRowThreads * kRowPacks, "RMSNorm of rows of ", width,
          " elements; 1 to ", kRowThreads * kRowPacks * kPack<T>, " fit into registers");
  auto with = [&](auto per_thread) {
    f(per_thread, round_to_warps(ceil_div(packs, per_thread())));
  };
  if (packs <= kRowThreads / 4) return with(std::integral_constant<int, 1>{});
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
      branch(delta.defined(), [&](auto adds) {
        with_row_plan<T>(width, [&](auto packs, int threads) {
          launch(rmsnorm_kernel<T, even(), packs(), adds()>, {rows, 1, threads}, as<T>(y),
                 as<float>(rstd), as<T>(x), as<T>(delta), as<T>(sum), as<T>(gain), eps, int(width));
        });
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
      branch(d_sum.defined(), [&](auto adds) {
        with_row_plan<T>(width, [&](auto packs, int threads) {
          launch(rmsnorm_backward_kernel<T, even(), packs(), adds()>, {rows, 1, threads}, as<T>(dx),
                 as<T>(dy), as<T>(d_sum), as<T>(x), as<float>(rstd), as<T>(gain), int(width));
        });
      });
    });
  });
}

void add_norm(Kernels& k) {
  k.rmsnorm = rmsnorm;
  k.rmsnorm_backward = rmsnorm_backward;
}

}  // namespace lockstep::cuda
