// Rung 3, wgmma + TMA: copies and products leave the threads' hands.
//
// On the rung before, each mma comes with another instruction: ldmatrix, addresses, cp.async. And
// mma.sync cannot use more than about 0.69 of what the library makes of a Hopper's tensor cores.
// Here one thread asks for two boxes per step, and four warps together start a product whose
// operands come straight from shared memory.
//
//     for each step along k:   thread 0: two TMA loads -> all wait -> wgmma -> all wait
//
// The waiting is what the next rung removes: at any time either the copy engine or the tensor cores
// stand still, and so this is slower than the rung before.

#include "08_kernels/bf16_ladder.h"
#include "08_kernels/hopper_tile.h"

namespace lockstep::ladder {

namespace {

struct Shared {
  Stage stage;
  uint64_t full;
};

__global__ void __launch_bounds__(128 * kConsumers)
    wgmma_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                 bf16* c, int m, int n, int k) {
  extern __shared__ __align__(1024) char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  int row = blockIdx.y * kTileM, column = blockIdx.x * kTileN, consumer = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    hopper::init(&s.full, 1);
    hopper::publish_barriers();
  }
  __syncthreads();

  float sum[128];
  int parity = 0;
  for (int at = 0; at < k; at += kTileK) {
    if (threadIdx.x == 0) {
      hopper::arrive_expecting(&s.full, sizeof(s.stage.a) + sizeof(s.stage.b));
      hopper::load_box(s.stage.a, a, row, at, &s.full);
      hopper::load_box(s.stage.b, b, column, at, &s.full);
    }
    hopper::wait(&s.full, parity);
    parity ^= 1;
    multiply<false, false>(sum, s.stage.a + consumer * 64 * kTileK, s.stage.b, at > 0);
    hopper::finish_products(sum);
    __syncthreads();  // both warpgroups have read the stage
  }
  store_pairs(c, m, n, row + consumer * 64, column, sum);
}

void launch(const Matmul& p, cudaStream_t stream) {
  check(cudaFuncSetAttribute(wgmma_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             sizeof(Shared)));
  CUtensorMap a = operand_map(p.a, p.m, p.k, true, kTileM);
  CUtensorMap b = operand_map(p.b, p.n, p.k, true, kTileN);
  dim3 grid(unsigned(tiles(p.n, kTileN)), unsigned(tiles(p.m, kTileM)));
  wgmma_kernel<<<grid, 128 * kConsumers, sizeof(Shared), stream>>>(a, b, static_cast<bf16*>(p.c),
                                                                   int(p.m), int(p.n), int(p.k));
  check(cudaGetLastError());
}

}  // namespace

MatmulRung hopper_wgmma() {
  return {"wgmma + TMA", "the copy engine fills a tile, four warps start one product",
          plain_for_hopper, launch};
}

}  // namespace lockstep::ladder
