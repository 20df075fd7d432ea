// Rung 5, coarse in two dimensions: a thread computes a square of 8 x 8.
//
//               bs[i]  ■ ■ ■ ■ ■ ■ ■ ■     In each step it reads 8 + 8 numbers from shared memory
//   as[.][i]  ■        ┌─────────────┐     and makes 64 products of them: 4 for each number read,
//             ■        │  64 sums,   │     where the rung before made less than one. 64 sums are
//             ⋮        │ in registers│     64 registers; what a thread gains here it pays for in
//             ■        └─────────────┘     fewer threads at once.
//
// On the rung before, ncu shows a twelfth of the MIO Throttle, but now "Stall Short Scoreboard":
// each multiplication waits for what it reads from shared memory, and the fp32 pipe ("FMA" in
// Compute Workload Analysis) is busy a quarter of the time.

#include "08_kernels/sgemm.h"

namespace lockstep::ladder {

constexpr int kSize = 128, kDepth = 8;  // the block's tile: 128 x 128, 8 steps at once
constexpr int kSums = 8;                // of a thread, in each direction
constexpr int kThreads = kSize * kSize / (kSums * kSums);  // 256

static __global__ void __launch_bounds__(kThreads)
    coarse_2d_kernel(float* c, const float* a, const float* b, int m, int n, int k) {
  __shared__ float as[kSize][kDepth], bs[kDepth][kSize];
  int row = blockIdx.y * kSize, column = blockIdx.x * kSize;
  int y = threadIdx.x / (kSize / kSums) * kSums, x = threadIdx.x % (kSize / kSums) * kSums;
  float sums[kSums][kSums] = {};
  for (int first = 0; first < k; first += kDepth) {
    for (int i = threadIdx.x; i < kSize * kDepth; i += kThreads) {  // four each
      int a_y = i / kDepth, a_x = i % kDepth, b_y = i / kSize, b_x = i % kSize;
      bool a_inside = row + a_y < m && first + a_x < k;
      bool b_inside = first + b_y < k && column + b_x < n;
      as[a_y][a_x] = a_inside ? a[int64_t(row + a_y) * k + first + a_x] : 0;
      bs[b_y][b_x] = b_inside ? b[int64_t(first + b_y) * n + column + b_x] : 0;
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      float of_a[kSums], of_b[kSums];
      for (int s = 0; s < kSums; ++s) of_a[s] = as[y + s][i];
      for (int s = 0; s < kSums; ++s) of_b[s] = bs[i][x + s];
      for (int s = 0; s < kSums; ++s)
        for (int t = 0; t < kSums; ++t) sums[s][t] += of_a[s] * of_b[t];
    }
    __syncthreads();
  }
  for (int s = 0; s < kSums; ++s)
    for (int t = 0; t < kSums; ++t)
      if (row + y + s < m && column + x + t < n)
        c[int64_t(row + y + s) * n + column + x + t] = sums[s][t];
}

MatmulRung sgemm_coarse_2d() {
  return sgemm_rung("coarse 2D", "a thread keeps 8 x 8 sums", coarse_2d_kernel,
                    {kSize, kSize, kThreads});
}

}  // namespace lockstep::ladder
