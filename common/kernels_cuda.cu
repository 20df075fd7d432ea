// The table of kernels for CUDA, put together.

#include "common/kernels_cuda.h"

namespace lockstep::cuda {

void add_all(Kernels& k) {
  add_matmul(k);
  add_attention(k);
  add_decode(k);
  add_norm(k);
  add_layers(k);
  add_embedding(k);
  add_loss(k);
  add_elementwise(k);
  add_optimizer(k);
}

}  // namespace lockstep::cuda
