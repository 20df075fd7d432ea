// Rung 7, warp tile: a warp works on one compact rectangle of the block's tile, 64 x 32.
//
//         128 columns               a warp's 64 x 32: lane (y, x), 8 x 4 of them, has 2 x 2
//      ┌────┬────┬────┬────┐        groups of 4 x 4 sums; groups of neighbours lie side by side
//      │ w0 │ w1 │ w2 │ w3 │
//  128 ├────┼────┼────┼────┤             ┌ 4 lanes ┬ 4 lanes ┐
//      │ w4 │ w5 │ w6 │ w7 │             │ x 4 col │ again   │  16 + 16 columns
//      └────┴────┴────┴────┘             └─────────┴─────────┘
//
// On the rung before, 40 % of the turns that loads take in shared memory are bank conflicts (ncu's
// Memory tables): neighbouring threads read 16 bytes each at a distance of 32, so half of the banks
// are asked twice. Here they read 16 bytes side by side, and a warp needs only 64 + 32 different
// numbers in a step instead of 16 + 128: one read serves several lanes.

#include "08_kernels/sgemm.h"
#include "common/kernels_cuda.h"

namespace lockstep::ladder {

constexpr int kSize = 128, kDepth = 16, kSums = 8, kThreads = 256;
constexpr int kWarpRows = 64, kWarpColumns = 32;
using Four = cuda::Pack<float, 4>;

template <bool Even>
static __device__ Four fetch(const float* matrix, int rows, int columns, int y, int x) {
  if (y >= rows || x >= columns) return {};
  return cuda::load<Even, 4>(matrix + int64_t(y) * columns + x, columns - x);
}

template <bool Even>
static __global__ void __launch_bounds__(kThreads)
    warp_tile_kernel(float* c, const float* a, const float* b, int m, int n, int k) {
  __shared__ alignas(16) float as[kDepth][kSize + 4], bs[kDepth][kSize];
  int row = blockIdx.y * kSize, column = blockIdx.x * kSize;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int y = warp / 4 * kWarpRows + lane / 4 * 4;     // this thread's rows: y + 0..3, y + 32 + 0..3
  int x = warp % 4 * kWarpColumns + lane % 4 * 4;  // and columns: x + 0..3, x + 16 + 0..3
  float sums[kSums][kSums] = {};
  for (int first = 0; first < k; first += kDepth) {
#pragma unroll
    for (int i = threadIdx.x; i < kSize * kDepth / 4; i += kThreads) {  // two groups of each
      int a_y = i / 4, a_x = i % 4 * 4, b_y = i / 32, b_x = i % 32 * 4;
      Four of_a = fetch<Even>(a, m, k, row + a_y, first + a_x);
      for (int j = 0; j < 4; ++j) as[a_x + j][a_y] = of_a.at[j];
      *reinterpret_cast<Four*>(&bs[b_y][b_x]) = fetch<Even>(b, k, n, first + b_y, column + b_x);
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      Four left[2], right[2];
      for (int half = 0; half < 2; ++half) {
        left[half] = *reinterpret_cast<const Four*>(&as[i][y + 32 * half]);
        right[half] = *reinterpret_cast<const Four*>(&bs[i][x + 16 * half]);
      }
      for (int s = 0; s < kSums; ++s)
        for (int t = 0; t < kSums; ++t)
          sums[s][t] += left[s / 4].at[s % 4] * right[t / 4].at[t % 4];
    }
    __syncthreads();
  }
  for (int s = 0; s < kSums; ++s)
    for (int t = 0; t < kSums; t += 4) {
      int at_y = row + y + s / 4 * 32 + s % 4, at_x = column + x + t / 4 * 16;
      Four four = {sums[s][t], sums[s][t + 1], sums[s][t + 2], sums[s][t + 3]};
      if (at_y < m && at_x < n) cuda::store<Even>(c + int64_t(at_y) * n + at_x, n - at_x, four);
    }
}

MatmulRung sgemm_warp_tile() {
  return sgemm_rung("warp tile", "a warp's reads lie together", warp_tile_kernel<false>,
                    {kSize, kSize, kThreads}, warp_tile_kernel<true>);
}

}  // namespace lockstep::ladder
