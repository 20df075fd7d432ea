// For a build without CUDA.

#include "08_kernels/use_matmul.h"

namespace lockstep {

void use_own_matmul(Kernels&) {}

}  // namespace lockstep
