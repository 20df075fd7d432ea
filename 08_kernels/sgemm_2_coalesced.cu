// Rung 2, coalesced: neighbouring threads take neighbouring columns. Two words are exchanged.
//
// On the rung before, ncu shows 16.5 sectors for each load from global memory: 32 for one of a, 1
// for one of b. Each request for a is cut into 32 pieces, the load unit is behind with them ("Stall
// LG Throttle"), and 4 % of the issue slots are used. Now a warp reads one number of a (the same
// for all, one sector) and 32 neighbours in a row of b (4 sectors): 2.5 on average.

#include "08_kernels/sgemm.h"

namespace lockstep::ladder {

static __global__ void coalesced_kernel(float* c, const float* a, const float* b, int m, int n,
                                        int k) {
  int row = blockIdx.y * 32 + threadIdx.x / 32;
  int column = blockIdx.x * 32 + threadIdx.x % 32;
  if (row >= m || column >= n) return;
  float sum = 0;
  for (int i = 0; i < k; ++i) sum += a[int64_t(row) * k + i] * b[int64_t(i) * n + column];
  c[int64_t(row) * n + column] = sum;
}

MatmulRung sgemm_coalesced() {
  return sgemm_rung("coalesced", "a warp reads neighbours", coalesced_kernel, {32, 32, 1024});
}

}  // namespace lockstep::ladder
