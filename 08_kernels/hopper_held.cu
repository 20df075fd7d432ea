// Rung 7, held results: a tile is stored under the products of the next one.
//
// On the rung before, both consumers finish a tile at the same time, and the tensor cores are idle
// for some 1500 cycles while the result goes through shared memory: 1 % of the time at 8192^3, 5 %
// where k is 2048. But a warp's 128 sums, rounded to bf16, need 64 registers, and these are free:
//
//     consumer 0    wgmma t0 ............|round| wgmma t1 ............|round| wgmma t2
//                                                store t0                     store t1
//     consumer 1    wgmma t0 ...............|round| wgmma t1 ............|round| wgmma t2
//
// In the first eight steps of a tile, a consumer starts its products and, while they run, stores a
// panel of the tile before; the consumers do so in turns. In between it only rounds, which takes
// less time than the other consumer's products of one step. Leaving the stores out altogether makes
// it no faster; leaving out the rounding as well, 0.8 % where k is 2048. Of a result in fp32 half
// fits into the registers and the other half is stored at once; such results are gradients of
// weights, whose k is long.
//
// The second thing is power. The GPU is at its limit, so instructions cost time, and of the 78 in a
// step most computed addresses of tiles. Those of stage 0 are now computed once, and 45 are left.
//
// 0.968 of the library become 0.992 over the training shapes, 0.98 become 1.00 at 8192^3.

#include <algorithm>

#include "08_kernels/bf16_ladder.h"
#include "08_kernels/hopper_tile.h"
#include "common/kernels_cuda.h"

namespace lockstep::ladder {

namespace {

using Shared = ClusterMemory;
constexpr int kStages = Shared::kStages, kBuffers = Shared::kBuffers, kGroup = 8;

template <bool TA, bool TB, class Out>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    held_kernel(const __grid_constant__ Maps maps, TileOrder order, int steps, bool add) {
  extern __shared__ __align__(1024) char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  // The same for a whole warp, which the compiler cannot see by itself.
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), rank = hopper::cluster_rank();
  const int first = blockIdx.x / kCluster, stride = gridDim.x / kCluster;
  s.begin();

  hopper::Place<kStages> place;
  int row, column;
  if (warpgroup == 0) {
    hopper::give_registers<40>();
    if (threadIdx.x == 0) {
      for (int tile = first; tile < order.count(); tile += stride) {
        order.find(tile, &row, &column);
        for (int i = 0; i < steps; ++i, place.advance()) {
          hopper::wait(&s.empty[place.stage], place.parity ^ 1);
          load_stage<TA, TB>(s.stages[place.stage], &s.full[place.stage], maps.a, maps.b,
                             (row * kCluster + rank) * kTileM, column * kTileN, i * kTileK, rank);
        }
      }
    }
  } else {
    hopper::take_registers<232>();
    const int consumer = warpgroup - 1, warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
    const uint32_t a = hopper::tile_at(s.stages[0].a + consumer * kBox, kBoxBytes);
    const uint32_t b = hopper::tile_at(s.stages[0].b, kBoxBytes);
    constexpr int at_once = kAtOnce<Out>;
    float sum[128];
    uint32_t held[kHeldWords];
    int held_tile = -1;

    auto start_step = [&](bool add_up) {
      hopper::wait(&s.full[place.stage], place.parity);
      int stage = place.stage * int(sizeof(Stage) / 16);
      multiply<TA, !TB>(sum, a + stage, b + stage, add_up);
    };
    auto finish_step = [&] {
      hopper::finish_products(sum);
      if (lane < kCluster) hopper::arrive_at(&s.empty[place.stage], lane);  // in both blocks
      place.advance();
    };
    auto find = [&](int tile) {
      order.find(tile, &row, &column);
      row = (row * kCluster + rank) * kTileM + warp * 16, column *= kTileN;
    };
    auto store_held = [&](int i) {
      store_panel<Out, kBuffers>(maps.c, row, column + at_once * 2 + i * kPanelColumns<Out>,
                                 held + i * kPanelWords,
                                 s.panels[warp] + i % kBuffers * kPanelBytes, add);
    };

    for (int tile = first; tile < order.count(); tile += stride) {
#pragma unroll
      for (int i = 0; i < kHeldSteps; ++i) {
        start_step(i > 0);
        if (i % kConsumers == consumer && held_tile >= 0) {
          if (i < kConsumers) find(held_tile);
          store_held(i / kConsumers);
        }
        finish_step();
      }
      for (int i = kHeldSteps; i < steps; ++i) start_step(true), finish_step();
      if constexpr (at_once > 0) {
        find(tile);
        store_panels<Out, kBuffers, kHeldPanels>(maps.c, row, column, sum, s.panels[warp], add);
      }
      to_words<Out>(held, sum + at_once);
      held_tile = tile;
    }
    find(held_tile);
#pragma unroll
    for (int i = 0; i < kHeldPanels; ++i) store_held(i);
    hopper::wait_stores<0>();
  }
  hopper::cluster_barrier();
}

template <bool TA, bool TB, class Out>
void launch_as(const Matmul& p, cudaStream_t stream) {
  auto kernel = held_kernel<TA, TB, Out>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
  TileOrder order{int(tiles(p.m, kCluster * kTileM)), int(tiles(p.n, kTileN)), kGroup};
  int clusters = std::min(multiprocessors() / kCluster, order.count());
  kernel<<<clusters * kCluster, kThreads, sizeof(Shared), stream>>>(cluster_maps(p), order,
                                                                    steps_of(p), p.beta == 1);
  check(cudaGetLastError());
}

void launch(const Matmul& p, cudaStream_t stream) {
  with_form(p,
            [&](auto ta, auto tb, auto out) { launch_as<ta(), tb(), decltype(out)>(p, stream); });
}

}  // namespace

MatmulRung hopper_held() {
  return {"held results", "a tile is stored under the next one's products", fits_hopper, launch};
}

}  // namespace lockstep::ladder
