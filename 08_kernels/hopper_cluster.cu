// Rung 6, clusters of two with multicast.
//
// On the rung before, the profiler shows the tensor cores at 94 % and the L2 cache, the busiest
// part after them, at 63 %: each block reads 48 KB for each step. Two blocks whose tiles lie above
// each other need the same tile of b. As a cluster they run at the same time on neighbouring
// multiprocessors; each loads half of b and the copy engine writes it into both. 32 KB are left.
//
//              b, half 0 | half 1
//     rank 0:  a 0  x    b             rank 0 loads a 0 and half 0 (for both)
//     rank 1:  a 1  x    b             rank 1 loads a 1 and half 1 (for both)
//
// The L2 cache is then at 57 %. The time stays the same, since it was not what limited it: 0.98 of
// the library at 4096^3, 0.98 at 8192^3, where the GPU runs at its power limit. What is left shows
// in cycles: at 8192^3 the last of 16 rounds of tiles is half empty (3 %), and laying out a result
// takes some 1500 cycles in which the tensor cores are idle (1 %, but 5 % where k is 2048).
//
// A stage is empty when the consumers of both blocks are done with it, and full when both halves
// have come. A block may not end while the other still writes to its memory.
//
// From here on a and b may each be transposed or not: wgmma reads a tile either way, only the boxes
// differ. And beta may be 1 into fp32, for gradients that add up: the copy engine adds in the L2
// cache instead of storing. Each element is added to once, so the result depends on no order.

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
    cluster_kernel(const __grid_constant__ Maps maps, TileOrder order, int k, bool add) {
  extern __shared__ __align__(1024) char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int warpgroup = threadIdx.x / 128, rank = hopper::cluster_rank();
  const int first = blockIdx.x / kCluster, step = gridDim.x / kCluster;
  s.begin();

  hopper::Place<kStages> place;
  int row, column;
  if (warpgroup == 0) {
    hopper::give_registers<40>();
    if (threadIdx.x == 0) {
      for (int tile = first; tile < order.count(); tile += step) {
        order.find(tile, &row, &column);
        for (int at = 0; at < k; at += kTileK, place.advance()) {
          hopper::wait(&s.empty[place.stage], place.parity ^ 1);
          load_stage<TA, TB>(s.stages[place.stage], &s.full[place.stage], maps.a, maps.b,
                             (row * kCluster + rank) * kTileM, column * kTileN, at, rank);
        }
      }
    }
  } else {
    hopper::take_registers<232>();
    const int consumer = warpgroup - 1, warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
    float sum[128];
    for (int tile = first; tile < order.count(); tile += step) {
      order.find(tile, &row, &column);
      for (int at = 0; at < k; at += kTileK, place.advance()) {
        Stage& stage = s.stages[place.stage];
        hopper::wait(&s.full[place.stage], place.parity);
        multiply<TA, !TB>(sum, stage.a + consumer * kBox, stage.b, at > 0);
        hopper::finish_products(sum);
        if (lane < kCluster) hopper::arrive_at(&s.empty[place.stage], lane);  // in both blocks
      }
      store_panels<Out, kBuffers, kTileN / kPanelColumns<Out>>(
          maps.c, (row * kCluster + rank) * kTileM + warp * 16, column * kTileN, sum,
          s.panels[warp], add);
    }
    hopper::wait_stores<0>();
  }
  hopper::cluster_barrier();
}

template <bool TA, bool TB, class Out>
void launch_as(const Matmul& p, cudaStream_t stream) {
  auto kernel = cluster_kernel<TA, TB, Out>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
  TileOrder order{int(tiles(p.m, kCluster * kTileM)), int(tiles(p.n, kTileN)), kGroup};
  int clusters = std::min(multiprocessors() / kCluster, order.count());
  kernel<<<clusters * kCluster, kThreads, sizeof(Shared), stream>>>(cluster_maps(p), order,
                                                                    int(p.k), p.beta == 1);
  check(cudaGetLastError());
}

void launch(const Matmul& p, cudaStream_t stream) {
  with_form(p,
            [&](auto ta, auto tb, auto out) { launch_as<ta(), tb(), decltype(out)>(p, stream); });
}

}  // namespace

MatmulRung hopper_cluster() {
  return {"clusters, multicast", "two blocks share what both need", fits_hopper, launch};
}

}  // namespace lockstep::ladder
