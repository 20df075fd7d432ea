// Rung 3, tile: the block fetches squares of a and b into shared memory, and all its threads use
// them from there.
//
//              k                    Without this each number of a is fetched from far away by every
//          ┌───┬─▶─┐ a      b ┌───┐ block in its row of blocks, 32 times by each: once for each
//     c    │   │ S │          │ S │ column. Now it is fetched once per block: 32 times fewer bytes
//   ┌───┐  └───┴───┘          ▼   │ from L2.
//   │ S │                     └───┘
//
// On the rung before, ncu still shows "Stall LG Throttle" first, though lower: two loads for every
// multiplication are more than the unit for global memory can take, even if the cache has the data.
// The price of shared memory: two barriers per square, one before it is read (all of it is there)
// and one before it is overwritten (nobody needs it any more).
//
// Rows and columns outside of the matrices are filled with zeros, which add nothing.

#include "08_kernels/sgemm.h"

namespace lockstep::ladder {

constexpr int kTile = 32;

static __global__ void tile_kernel(float* c, const float* a, const float* b, int m, int n, int k) {
  __shared__ float as[kTile][kTile], bs[kTile][kTile];
  int y = threadIdx.x / kTile, x = threadIdx.x % kTile;
  int row = blockIdx.y * kTile + y, column = blockIdx.x * kTile + x;
  float sum = 0;
  for (int first = 0; first < k; first += kTile) {
    as[y][x] = row < m && first + x < k ? a[int64_t(row) * k + first + x] : 0;
    bs[y][x] = first + y < k && column < n ? b[int64_t(first + y) * n + column] : 0;
    __syncthreads();
    for (int i = 0; i < kTile; ++i) sum += as[y][i] * bs[i][x];
    __syncthreads();
  }
  if (row < m && column < n) c[int64_t(row) * n + column] = sum;
}

MatmulRung sgemm_tile() {
  return sgemm_rung("tile", "squares in shared memory", tile_kernel, {kTile, kTile, kTile * kTile});
}

}  // namespace lockstep::ladder
