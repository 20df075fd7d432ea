// The first kernel: c = a + b, one thread for each element.
//
//     block 0          block 1          block 2          blocks of 256 threads cover n elements;
//     ├──── 256 ────┤  ├──── 256 ────┤  ├──── 256 ─ ─ ┤  the last one sticks out, hence the `if`
//     a ■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■■ n
//
// A launch only puts the kernel into the stream: the host goes on at once, and reads the result
// when it has waited for the stream.

#include "08_kernels/basics.h"
#include "common/kernels_cuda.h"

namespace lockstep::basics {

static __global__ void vector_add_kernel(float* c, const float* a, const float* b, int64_t n) {
  int64_t i = int64_t(blockIdx.x) * blockDim.x + threadIdx.x;
  if (i < n) c[i] = a[i] + b[i];
}

void vector_add(const Tensor& c, const Tensor& a, const Tensor& b) {
  int64_t n = c.size();
  require(a.size() == n && b.size() == n, "a vector of ", n, " is no sum of one of ", a.size(),
          " and one of ", b.size());
  if (n == 0) return;  // CUDA refuses a grid of no blocks
  const unsigned threads = 256;
  const unsigned blocks = unsigned((n + threads - 1) / threads);
  vector_add_kernel<<<blocks, threads, 0, device::stream()>>>(c.data<float>(), a.data<float>(),
                                                              b.data<float>(), n);
  check(cudaGetLastError());  // of the launch; what goes wrong inside shows at the next wait
}

}  // namespace lockstep::basics
