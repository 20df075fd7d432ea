// Rung 4, producer and consumers: the copies for the next steps run under the products of this one.
//
//     producer warpgroup (one thread)      wait(empty[i]) -> load stage i, tells full[i] -> i + 1
//     two consumer warpgroups              wait(full[i]) -> wgmma -> arrive(empty[i])    -> i + 1
//
// Four stages form a ring, so the producer is up to four steps ahead. It needs hardly any
// registers: setmaxnreg hands them to the consumers, which hold 128 sums each thread and would
// spill otherwise. On the rung before, the tensor cores stand still more than half of the time
// (0.45 of the library), while every warp waits for `full`. Here it is 0.88 at 4096^3.

#include "08_kernels/bf16_ladder.h"
#include "08_kernels/hopper_tile.h"

namespace lockstep::ladder {

namespace {

constexpr int kStages = 4;

struct Shared {
  Stage stages[kStages];
  uint64_t full[kStages], empty[kStages];
};

__global__ void __launch_bounds__(kThreads, 1)
    pipeline_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                    bf16* c, int m, int n, int k) {
  extern __shared__ __align__(1024) char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  int row = blockIdx.y * kTileM, column = blockIdx.x * kTileN, warpgroup = threadIdx.x / 128;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      hopper::init(&s.full[i], 1);
      hopper::init(&s.empty[i], kConsumers * 4);  // one lane of each warp
    }
    hopper::publish_barriers();
  }
  __syncthreads();

  hopper::Place<kStages> place;
  if (warpgroup == 0) {
    hopper::give_registers<40>();
    if (threadIdx.x != 0) return;
    for (int at = 0; at < k; at += kTileK, place.advance()) {
      Stage& stage = s.stages[place.stage];
      uint64_t* full = &s.full[place.stage];
      hopper::wait(&s.empty[place.stage], place.parity ^ 1);
      hopper::arrive_expecting(full, sizeof(stage.a) + sizeof(stage.b));
      hopper::load_box(stage.a, a, row, at, full);
      hopper::load_box(stage.b, b, column, at, full);
    }
  } else {
    hopper::take_registers<232>();
    int consumer = warpgroup - 1;
    float sum[128];
    for (int at = 0; at < k; at += kTileK, place.advance()) {
      Stage& stage = s.stages[place.stage];
      hopper::wait(&s.full[place.stage], place.parity);
      multiply<false, false>(sum, stage.a + consumer * 64 * kTileK, stage.b, at > 0);
      hopper::finish_products(sum);
      if (threadIdx.x % 32 == 0) hopper::arrive(&s.empty[place.stage]);
    }
    store_pairs(c, m, n, row + consumer * 64, column, sum);
  }
}

void launch(const Matmul& p, cudaStream_t stream) {
  check(cudaFuncSetAttribute(pipeline_kernel, cudaFuncAttributeMaxDynamicSharedMemorySize,
                             sizeof(Shared)));
  CUtensorMap a = operand_map(p.a, p.m, p.k, true, kTileM);
  CUtensorMap b = operand_map(p.b, p.n, p.k, true, kTileN);
  dim3 grid(unsigned(tiles(p.n, kTileN)), unsigned(tiles(p.m, kTileM)));
  pipeline_kernel<<<grid, kThreads, sizeof(Shared), stream>>>(a, b, static_cast<bf16*>(p.c),
                                                              int(p.m), int(p.n), int(p.k));
  check(cudaGetLastError());
}

}  // namespace

MatmulRung hopper_pipeline() {
  return {"producer, consumers", "a ring of four stages between a producer and two consumers",
          plain_for_hopper, launch};
}

}  // namespace lockstep::ladder
