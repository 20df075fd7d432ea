#include "common/kernels.h"

#include "common/device.h"

namespace lockstep {

static Kernels cpu_table() {
  Kernels k{};
  cpu::add_matmul(k);
  cpu::add_layers(k);
  cpu::add_attention(k);
  cpu::add_loss(k);
  cpu::add_elementwise(k);
  cpu::add_optimizer(k);
  return k;
}

static Kernels cuda_table() {
  Kernels k{};
  cuda::add_all(k);
  return k;
}

Kernels& kernels(Device device) {
  if (device == Device::CPU) {
    static Kernels table = cpu_table();
    return table;
  }
  static Kernels table = cuda_table();
  return table;
}

}  // namespace lockstep
