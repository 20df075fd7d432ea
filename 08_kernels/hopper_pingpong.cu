// Rung 7, ping-pong: the consumers take turns, so that one lays out its result while the other
// multiplies.
//
// On the rung before, both consumers work on the same tile and finish at the same time. Then the
// tensor cores are idle for some 1700 cycles, while 64 KB go from registers to shared memory: 5 %
// of the time where k is 2048. Here each consumer has a tile of its own:
//
//     consumer 0    wgmma t0 | lay out t0 ....... | wgmma t2 | lay out t2 ...
//     consumer 1             | wgmma t1           | lay out t1 ....... | wgmma t3
//
// Whoever multiplies has the tensor cores for itself and must keep them busy alone: it starts the
// next step's products before it waits for those of the last one. Its tile has 128 rows, so it
// holds twice as many sums for each column; 192 columns fit into the registers.
//
// The ring passes from one consumer to the other with the turn: stages come in the order of the
// tiles, and a consumer skips those of the other.

#include <algorithm>

#include "08_kernels/bf16_ladder.h"
#include "08_kernels/hopper_tile.h"
#include "common/kernels_cuda.h"

namespace lockstep::ladder {

namespace {

constexpr int kCluster = 2, kStages = 5, kBuffers = 1, kGroup = 8;
constexpr int kColumns = 192;

struct Shared {
  struct Stage {
    alignas(1024) bf16 a[kTileM * kTileK];
    alignas(1024) bf16 b[kColumns * kTileK];
  } stages[kStages];
  alignas(1024) char panels[4 * kConsumers][kBuffers * kPanelBytes];
  uint64_t full[kStages], empty[kStages], turn[kConsumers];
};

// One stage: this block's a, and for both blocks half of b. Where k runs along the rows that is
// half of the columns; elsewhere half of the steps along k of each box.
template <bool TA, bool TB>
__device__ void load_stage(Shared::Stage& stage, uint64_t* full, const CUtensorMap& a,
                           const CUtensorMap& b, int outer_a, int outer_b, int k, int rank) {
  hopper::arrive_expecting(full, sizeof(stage.a) + sizeof(stage.b));
  constexpr uint16_t both = (1 << kCluster) - 1;
  if constexpr (TA) {
    for (int i = 0; i < kTileM / 64; ++i)
      hopper::load_box(stage.a + i * kBox, a, k, outer_a + i * 64, full);
  } else {
    hopper::load_box(stage.a, a, outer_a, k, full);
  }
  if constexpr (TB) {
    int half = rank * kColumns / kCluster;
    hopper::load_box(stage.b + half * kTileK, b, outer_b + half, k, full, both);
  } else {
    int half = rank * kTileK / kCluster;
    for (int i = 0; i < kColumns / 64; ++i)
      hopper::load_box(stage.b + i * kBox + half * 64, b, k + half, outer_b + i * 64, full, both);
  }
}

template <bool TA, bool TB, class Out>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    pingpong_kernel(const __grid_constant__ CUtensorMap a, const __grid_constant__ CUtensorMap b,
                    const __grid_constant__ CUtensorMap c, TileOrder order, int k, bool add) {
  extern __shared__ __align__(1024) char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int warpgroup = threadIdx.x / 128, rank = hopper::cluster_rank();
  const int first = blockIdx.x / kCluster, step = gridDim.x / kCluster;
  if (threadIdx.x == 0) {
    for (int i = 0; i < kStages; ++i) {
      hopper::init(&s.full[i], 1);
      hopper::init(&s.empty[i], kCluster * 4);  // the warps of one consumer in each block
    }
    for (uint64_t& turn : s.turn) hopper::init(&turn, 4);
    hopper::publish_barriers();
  }
  hopper::cluster_barrier();

  hopper::Place<kStages> place;
  int row, column;
  if (warpgroup == 0) {
    hopper::give_registers<24>();
    if (threadIdx.x == 0) {
      for (int tile = first; tile < order.count(); tile += step) {
        order.find(tile, &row, &column);
        for (int at = 0; at < k; at += kTileK, place.advance()) {
          hopper::wait(&s.empty[place.stage], place.parity ^ 1);
          load_stage<TA, TB>(s.stages[place.stage], &s.full[place.stage], a, b,
                             (row * kCluster + rank) * kTileM, column * kColumns, at, rank);
        }
      }
    }
  } else {
    hopper::take_registers<240>();
    const int consumer = warpgroup - 1, warp = threadIdx.x / 32 - 4, lane = threadIdx.x % 32;
    const int steps = (k + kTileK - 1) / kTileK;
    auto release = [&](int stage) {  // in both blocks
      if (lane < kCluster) hopper::arrive_at(&s.empty[stage], lane);
    };
    float upper[kColumns / 2], lower[kColumns / 2];  // the first 64 rows, the other 64
    int my_turn = consumer ^ 1;                      // parity: the first turn is consumer 0's
    place.skip(consumer * steps);
    for (int tile = first + consumer * step; tile < order.count(); tile += kConsumers * step) {
      order.find(tile, &row, &column);
      hopper::wait(&s.turn[consumer], my_turn);
      my_turn ^= 1;
      int before = -1;
      for (int i = 0; i < steps; ++i, place.advance()) {
        Shared::Stage& stage = s.stages[place.stage];
        hopper::wait(&s.full[place.stage], place.parity);
        hopper::begin_products();
        multiply_stage<TA, !TB>(upper, stage.a, stage.b, i > 0);
        multiply_stage<TA, !TB>(lower, stage.a + kBox, stage.b, i > 0);
        hopper::commit_products();
        hopper::wait_products<1>();  // those of the step before
        if (before >= 0) release(before);
        before = place.stage;
      }
      if (lane == 0) hopper::arrive(&s.turn[consumer ^ 1]);
      hopper::finish_products(upper);
      hopper::finish_products(lower);
      release(before);
      place.skip(steps);
      row = (row * kCluster + rank) * kTileM + warp % 4 * 16;
      store_panels<Out, kBuffers>(c, row, column * kColumns, upper, s.panels[warp], add);
      store_panels<Out, kBuffers>(c, row + 64, column * kColumns, lower, s.panels[warp], add);
    }
    hopper::wait_stores<0>();
  }
  hopper::cluster_barrier();
}

template <bool TA, bool TB, class Out>
void launch_as(const Matmul& p, cudaStream_t stream) {
  auto kernel = pingpong_kernel<TA, TB, Out>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
  CUtensorMap a = operand_map(p.a, p.m, p.k, !TA, TA ? kTileK : kTileM);
  CUtensorMap b = operand_map(p.b, p.n, p.k, TB, (TB ? kColumns : kTileK) / kCluster);
  CUtensorMap c = hopper::tensor_map(p.c, p.out, p.m, p.n, 16);
  TileOrder order{int(tiles(p.m, kCluster * kTileM)), int(tiles(p.n, kColumns)), kGroup};
  int clusters = std::min(multiprocessors() / kCluster, order.count());
  kernel<<<clusters * kCluster, kThreads, sizeof(Shared), stream>>>(a, b, c, order, int(p.k),
                                                                    p.beta == 1);
  check(cudaGetLastError());
}

void launch(const Matmul& p, cudaStream_t stream) {
  cuda::branch(p.ta == Op::T, [&](auto ta) {
    cuda::branch(p.tb == Op::T, [&](auto tb) {
      cuda::for_type(p.out, [&](auto out) { launch_as<ta(), tb(), decltype(out)>(p, stream); });
    });
  });
}

}  // namespace

MatmulRung hopper_pingpong() {
  return {"ping-pong", "one consumer stores while the other multiplies", fits_hopper, launch};
}

}  // namespace lockstep::ladder
