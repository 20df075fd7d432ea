#pragma once
// For files that talk to CUDA themselves: the rank's stream, and check() for CUDA calls.

#include <cuda_runtime.h>

#include "common/check.h"

namespace lockstep {

inline void check(cudaError_t status, Here here = {}) {
  if (status != cudaSuccess)
    throw Error(text("CUDA: ", cudaGetErrorString(status), " (", cudaGetErrorName(status), ")"),
                here.where);
}

namespace device {
// The stream on which everything of this rank runs, in order. Thread-local, like the memory
// account.
cudaStream_t stream();

// While it lives, what the calling thread enqueues goes into another stream instead.
class OnStream {
 public:
  explicit OnStream(cudaStream_t stream);
  ~OnStream();
  OnStream(const OnStream&) = delete;
};
}  // namespace device

}  // namespace lockstep
