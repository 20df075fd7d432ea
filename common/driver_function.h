#pragma once
// A function of CUDA's driver that the runtime does not offer. Looked up, not linked: a program
// that links the driver does not start on a machine without one.

#include "common/device_cuda.h"

namespace lockstep {

// F: what decltype(&name) says, as the driver of CUDA 12.0 has it.
template <class F>
F driver_function(const char* name) {
  void* entry = nullptr;
  cudaDriverEntryPointQueryResult found;
#if CUDART_VERSION >= 12050
  check(cudaGetDriverEntryPointByVersion(name, &entry, 12000, cudaEnableDefault, &found));
#else
  check(cudaGetDriverEntryPoint(name, &entry, cudaEnableDefault, &found));
#endif
  require(found == cudaDriverEntryPointSuccess, "the driver has no ", name);
  return reinterpret_cast<F>(entry);
}

}  // namespace lockstep
