// Rung 1, naive: one thread per element of c, which walks along a row of a and down a column of b.
//
// The obvious numbering is the slow one. Threads of a warp differ in threadIdx.x, and here that
// counts rows: the 32 threads read 32 rows of a at once, 4 bytes from each. Memory moves whole
// sectors of 32 bytes, so 28 of 32 bytes travel for nothing, and the same happens when c is
// written.

#include "08_kernels/sgemm.h"

namespace lockstep::ladder {

static __global__ void naive_kernel(float* c, const float* a, const float* b, int m, int n, int k) {
  int row = blockIdx.y * 32 + threadIdx.x % 32;
  int column = blockIdx.x * 32 + threadIdx.x / 32;
  if (row >= m || column >= n) return;
  float sum = 0;
  for (int i = 0; i < k; ++i) sum += a[int64_t(row) * k + i] * b[int64_t(i) * n + column];
  c[int64_t(row) * n + column] = sum;
}

MatmulRung sgemm_naive() {
  return sgemm_rung("naive", "one thread per element", naive_kernel, {32, 32, 1024});
}

}  // namespace lockstep::ladder
