// Rung 6, vectorised: 16 bytes with each access, in global and in shared memory.
//
// On the rung before, ncu counts 3.1 billion instructions at 4096^3, of which 2.1 are
// multiplications: loads, stores and their addresses take issue slots that multiplications could
// have had. A thread's 8 numbers of b lie beside each other; those of a do not, so a is turned on
// its way into shared memory: as[i][row]. 4 loads of 16 bytes then bring what 64 products need.
//
// The rows of as[] are padded by 4 numbers: turning writes down a column, and without padding all
// threads of a warp would write to the same few of the 32 banks of shared memory.
//
// Even: n and k are divisible by 4 and pointers aligned, so that each group of 4 lies inside or
// outside as a whole. Otherwise the groups are moved number by number.

#include "08_kernels/sgemm.h"
#include "common/kernels_cuda.h"

namespace lockstep::ladder {

constexpr int kSize = 128, kDepth = 8, kSums = 8, kThreads = 256;
using Four = cuda::Pack<float, 4>;

template <bool Even>
static __device__ Four fetch(const float* matrix, int rows, int columns, int y, int x) {
  if (y >= rows || x >= columns) return {};
  return cuda::load<Even, 4>(matrix + int64_t(y) * columns + x, columns - x);
}

template <bool Even>
static __global__ void __launch_bounds__(kThreads)
    vectorised_kernel(float* c, const float* a, const float* b, int m, int n, int k) {
  __shared__ alignas(16) float as[kDepth][kSize + 4], bs[kDepth][kSize];
  int row = blockIdx.y * kSize, column = blockIdx.x * kSize;
  int y = threadIdx.x / 16 * kSums, x = threadIdx.x % 16 * kSums;
  int a_y = threadIdx.x / 2, a_x = threadIdx.x % 2 * 4;  // each thread fetches one group of each
  int b_y = threadIdx.x / 32, b_x = threadIdx.x % 32 * 4;
  float sums[kSums][kSums] = {};
  for (int first = 0; first < k; first += kDepth) {
    Four of_a = fetch<Even>(a, m, k, row + a_y, first + a_x);
    Four of_b = fetch<Even>(b, k, n, first + b_y, column + b_x);
    for (int i = 0; i < 4; ++i) as[a_x + i][a_y] = of_a.at[i];
    *reinterpret_cast<Four*>(&bs[b_y][b_x]) = of_b;
    __syncthreads();
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      Four left[2], right[2];
      for (int half = 0; half < 2; ++half) {
        left[half] = *reinterpret_cast<const Four*>(&as[i][y + 4 * half]);
        right[half] = *reinterpret_cast<const Four*>(&bs[i][x + 4 * half]);
      }
      for (int s = 0; s < kSums; ++s)
        for (int t = 0; t < kSums; ++t)
          sums[s][t] += left[s / 4].at[s % 4] * right[t / 4].at[t % 4];
    }
    __syncthreads();
  }
  for (int s = 0; s < kSums; ++s)
    for (int t = 0; t < kSums; t += 4) {
      int at_y = row + y + s, at_x = column + x + t;
      Four four = {sums[s][t], sums[s][t + 1], sums[s][t + 2], sums[s][t + 3]};
      if (at_y < m && at_x < n) cuda::store<Even>(c + int64_t(at_y) * n + at_x, n - at_x, four);
    }
}

MatmulRung sgemm_vectorised() {
  return sgemm_rung("vectorised", "16 bytes with each access", vectorised_kernel<false>,
                    {kSize, kSize, kThreads}, vectorised_kernel<true>);
}

}  // namespace lockstep::ladder
