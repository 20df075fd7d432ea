#pragma once
// One operation on a tensor is one kernel: each(n, f) calls f(i) for i = 0 ... n - 1, a thread
// each, and row_sums(sums, rows, width, f) adds up f(row, column) over the columns, a block each.

#include "common/kernels_cuda.h"

namespace lockstep {

template <class F>
__global__ void each_kernel(int64_t n, F f) {
  int64_t i = cuda::flat_index();
  if (i < n) f(i);
}
template <class F>
void each(int64_t n, const F& f) {
  cuda::launch(each_kernel<F>, cuda::flat_grid(n, 1), n, f);
}

template <class S, class F>
__global__ void row_sums_kernel(S* sums, int64_t width, F f) {
  S sum = 0;
  for (int64_t j = threadIdx.x; j < width; j += blockDim.x) sum += f(int64_t(blockIdx.x), j);
  sum = cuda::block_sum(sum);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}
template <class S, class F>
void row_sums(S* sums, int64_t rows, int64_t width, const F& f) {
  cuda::launch(row_sums_kernel<S, F>, {rows, 1, 256}, sums, width, f);
}

}  // namespace lockstep
