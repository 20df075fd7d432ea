// Rung 8, stream-K: the last round of tiles is shared out evenly.
//
// On the rung before, the inner loop is within 1 % of what the tensor cores can do, but the GPU has
// 66 pairs of multiprocessors, and tiles come whole: 8192^3 has 1024 tiles, 15 rounds and 34 tiles
// more, for which half of the pairs wait. That is 3 % of the time. Here the steps of the last round
// (34 tiles of 128 steps) are laid end to end and cut into 66 equal shares:
//
//     tiles     |     t0      |     t1      |     t2      |
//     clusters  |   0    |   1    |   2    |   3    |   4 ...
//
// A share is the end of one tile and the beginning of the next, or lies within one. A cluster first
// computes the beginning and leaves its sums in memory; then it computes the end, fetches what
// others left of that tile, adds and stores. It waits only for clusters of lower number, which were
// started earlier and do not wait for it. Sums are added in a fixed order, so results can be
// repeated.
//
// What it costs is the way of the sums through the L2 cache, 17 MB there and back: as long as some
// 16 steps. Where less is saved (4096^3: a last round of 58 tiles), tiles stay whole. In one run
// 0.998 of the library become 1.014 at 8192^3.

#include <algorithm>

#include "08_kernels/bf16_ladder.h"
#include "08_kernels/hopper_tile.h"
#include "common/kernels_cuda.h"
#include "common/tensor.h"

namespace lockstep::ladder {

namespace {

using Shared = ClusterMemory;
constexpr int kStages = Shared::kStages, kBuffers = Shared::kBuffers, kGroup = 8;
constexpr int kSharingCosts = 16;  // steps that the partial sums take, as measured

// What a cluster does: whole tiles, then its share of the last round, up to two pieces. Each is at
// least kHeldSteps long.
struct Piece {
  int tile, begin, end;  // steps along k; none if they are equal
};
struct Share {
  Piece pieces[2];
  int helper;  // the first cluster that has a piece of the tile which this one ends
};
struct Work {
  static constexpr int kMostClusters = 72;
  int whole, clusters, steps;  // whole: tiles that are not shared
  Share shares[kMostClusters];
};

// Sums on their way from one warp to the one that has the same place in another cluster.
constexpr int kWarps = kCluster * kConsumers * 4;
struct Parts {
  float4* sums;  // [cluster, warp, 32, lane]
  int* ready;    // [cluster, warp], zero between launches

  __device__ void leave(int cluster, int warp, const float (&sum)[128]) const {
    int place = cluster * kWarps + warp, lane = threadIdx.x % 32;
#pragma unroll
    for (int i = 0; i < 32; ++i)
      __stcg(sums + (place * 32 + i) * 32 + lane,
             make_float4(sum[4 * i], sum[4 * i + 1], sum[4 * i + 2], sum[4 * i + 3]));
    __threadfence();
    __syncwarp();
    if (lane == 0) atomicExch(ready + place, 1);
  }
  __device__ void fetch(int cluster, int warp, float (&sum)[128]) const {
    int place = cluster * kWarps + warp, lane = threadIdx.x % 32;
    if (lane == 0)
      while (!atomicExch(ready + place, 0)) {
      }
    __threadfence();
    __syncwarp();
#pragma unroll
    for (int i = 0; i < 32; ++i) {
      float4 part = __ldcg(sums + (place * 32 + i) * 32 + lane);
      sum[4 * i] += part.x, sum[4 * i + 1] += part.y;
      sum[4 * i + 2] += part.z, sum[4 * i + 3] += part.w;
    }
  }
};

template <bool TA, bool TB, class Out>
__global__ void __cluster_dims__(kCluster, 1, 1) __launch_bounds__(kThreads, 1)
    stream_k_kernel(const __grid_constant__ Maps maps, TileOrder order,
                    const __grid_constant__ Work work, Parts parts, bool add) {
  extern __shared__ __align__(1024) char memory[];
  Shared& s = *reinterpret_cast<Shared*>(memory);
  const int warpgroup = __shfl_sync(~0u, threadIdx.x / 128, 0), rank = hopper::cluster_rank();
  const int cluster = blockIdx.x / kCluster;
  s.begin();

  hopper::Place<kStages> place;
  int row, column;
  if (warpgroup == 0) {
    hopper::give_registers<40>();
    if (threadIdx.x == 0) {
      auto load = [&](const Piece& piece) {
        order.find(piece.tile, &row, &column);
        for (int i = piece.begin; i < piece.end; ++i, place.advance()) {
          hopper::wait(&s.empty[place.stage], place.parity ^ 1);
          load_stage<TA, TB>(s.stages[place.stage], &s.full[place.stage], maps.a, maps.b,
                             (row * kCluster + rank) * kTileM, column * kTileN, i * kTileK, rank);
        }
      };
      for (int tile = cluster; tile < work.whole; tile += work.clusters)
        load({tile, 0, work.steps});
      for (const Piece& piece : work.shares[cluster].pieces) load(piece);
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

    auto compute = [&](int count) {
#pragma unroll
      for (int i = 0; i < kHeldSteps; ++i) {
        start_step(i > 0);
        if (i % kConsumers == consumer && held_tile >= 0) {
          if (i < kConsumers) find(held_tile);
          store_held(i / kConsumers);
        }
        finish_step();
      }
      held_tile = -1;
      for (int i = kHeldSteps; i < count; ++i) start_step(true), finish_step();
    };
    auto hold = [&](int tile) {
      if constexpr (at_once > 0) {
        find(tile);
        store_panels<Out, kBuffers, kHeldPanels>(maps.c, row, column, sum, s.panels[warp], add);
      }
      to_words<Out>(held, sum + at_once);
      held_tile = tile;
    };

    // Two loops, so that in the long one all of a warp is seen to do the same.
    for (int tile = cluster; tile < work.whole; tile += work.clusters)
      compute(work.steps), hold(tile);
    const Share& share = work.shares[cluster];
#pragma unroll 1
    for (int n = 0; n < 2; ++n) {
      Piece piece = share.pieces[n];
      if (piece.begin == piece.end) break;
      compute(piece.end - piece.begin);
      if (piece.end < work.steps) {
        parts.leave(cluster, rank * kConsumers * 4 + warp, sum);
      } else {
        for (int other = share.helper; other < cluster; ++other)
          parts.fetch(other, rank * kConsumers * 4 + warp, sum);
        hold(piece.tile);
      }
    }
    if (held_tile >= 0) {
      find(held_tile);
#pragma unroll
      for (int i = 0; i < kHeldPanels; ++i) store_held(i);
    }
    hopper::wait_stores<0>();
  }
  hopper::cluster_barrier();
}

// The memory of a rank, for the launches of its stream one after the other.
Parts parts_for(int clusters) {
  thread_local auto* sums = new Tensor(Tensor::empty({int64_t(clusters) * kWarps * 32 * 32 * 4},
                                                     DType::F32, Device::CUDA, Category::Buffers));
  thread_local auto* ready = new Tensor(
      Tensor::zeros({int64_t(clusters) * kWarps}, DType::F32, Device::CUDA, Category::Buffers));
  return {reinterpret_cast<float4*>(sums->raw()), reinterpret_cast<int*>(ready->raw())};
}

Work share_out(int tiles, int steps) {
  int most = multiprocessors() / kCluster, last = tiles % most;
  int saved = steps - int(int64_t(last) * steps / most);
  Work work{tiles, std::min(most, tiles), steps, {}};
  if (last == 0 || saved < kSharingCosts || steps - saved < 2 * kHeldSteps ||
      most > Work::kMostClusters)
    return work;
  work.whole = tiles - last, work.clusters = most;
  // Where a share begins, in steps of the last round. Not just behind the beginning of a tile, nor
  // just before its end.
  auto cut = [&](int cluster) {
    int at = int(int64_t(last) * steps * cluster / most), in_tile = at % steps;
    if (in_tile < kHeldSteps) return at - in_tile;
    return steps - in_tile < kHeldSteps ? at + steps - in_tile : at;
  };
  for (int cluster = 0; cluster < most; ++cluster) {
    Share& share = work.shares[cluster];
    int begin = cut(cluster), end = cut(cluster + 1), first = begin / steps;
    int border = (first + 1) * steps, i = 0;
    if (end > border) share.pieces[i++] = {work.whole + first + 1, 0, end - border};
    share.pieces[i] = {work.whole + first, begin % steps, std::min(end, border) - first * steps};
    for (share.helper = cluster; cut(share.helper) > first * steps;) --share.helper;
  }
  return work;
}

template <bool TA, bool TB, class Out>
void launch_as(const Matmul& p, cudaStream_t stream) {
  auto kernel = stream_k_kernel<TA, TB, Out>;
  check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, sizeof(Shared)));
  TileOrder order{int(tiles(p.m, kCluster * kTileM)), int(tiles(p.n, kTileN)), kGroup};
  Work work = share_out(order.count(), steps_of(p));
  kernel<<<work.clusters * kCluster, kThreads, sizeof(Shared), stream>>>(
      cluster_maps(p), order, work, parts_for(multiprocessors() / kCluster), p.beta == 1);
  check(cudaGetLastError());
}

void launch(const Matmul& p, cudaStream_t stream) {
  with_form(p,
            [&](auto ta, auto tb, auto out) { launch_as<ta(), tb(), decltype(out)>(p, stream); });
}

}  // namespace

MatmulRung hopper_stream_k() {
  return {"stream-K", "the last round of tiles in equal shares", fits_hopper, launch};
}

}  // namespace lockstep::ladder
