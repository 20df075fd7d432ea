// Rung 4, coarse in one dimension: a thread computes 8 elements of a column of c.
//
// On the rung before, ncu shows "Stall MIO Throttle": the queue to shared memory is full. Each
// multiplication needs two numbers from there, and shared memory delivers 32 of them per clock
// where the arithmetic units could use 256. A number of b that is in a register now serves 8
// multiplications with numbers of a: 9 reads for 8 products instead of 16. (Those of a are the same
// for the whole warp; the compiler fetches 4 neighbours at once.)

#include "08_kernels/sgemm.h"

namespace lockstep::ladder {

constexpr int kRows = 64, kColumns = 64,
              kDepth = 8;                           // of the block's tile; depth: of one step in k
constexpr int kSums = 8;                            // of a thread
constexpr int kThreads = kRows * kColumns / kSums;  // 512 = the elements of each of the two tiles

static __global__ void __launch_bounds__(kThreads)
    coarse_1d_kernel(float* c, const float* a, const float* b, int m, int n, int k) {
  __shared__ float as[kRows][kDepth], bs[kDepth][kColumns];
  int row = blockIdx.y * kRows, column = blockIdx.x * kColumns;  // where the tile begins
  int a_y = threadIdx.x / kDepth, a_x = threadIdx.x % kDepth;    // what this thread fetches
  int b_y = threadIdx.x / kColumns, b_x = threadIdx.x % kColumns;
  int y = b_y * kSums, x = b_x;  // what it computes
  float sums[kSums] = {};
  for (int first = 0; first < k; first += kDepth) {
    bool a_inside = row + a_y < m && first + a_x < k,
         b_inside = first + b_y < k && column + b_x < n;
    as[a_y][a_x] = a_inside ? a[int64_t(row + a_y) * k + first + a_x] : 0;
    bs[b_y][b_x] = b_inside ? b[int64_t(first + b_y) * n + column + b_x] : 0;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      float of_b = bs[i][x];
      for (int s = 0; s < kSums; ++s) sums[s] += as[y + s][i] * of_b;
    }
    __syncthreads();
  }
  for (int s = 0; s < kSums; ++s)
    if (row + y + s < m && column + x < n) c[int64_t(row + y + s) * n + column + x] = sums[s];
}

MatmulRung sgemm_coarse_1d() {
  return sgemm_rung("coarse 1D", "a thread keeps 8 sums", coarse_1d_kernel,
                    {kRows, kColumns, kThreads});
}

}  // namespace lockstep::ladder
