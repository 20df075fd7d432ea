#pragma once
// What the Hopper rungs of the matmul share. A block computes a tile of c in steps along k:
//
//                  256             a tile [128, 64] and b tile [64, 256] make one stage: 48 KB. Two
//              +---------+         consumer warpgroups hold the sum, 64 rows each.
//          k   |    b    |
//              +---------+         In shared memory a tile consists of boxes whose rows have 128
//        +---+ +---------+         bytes. Where k runs along the rows of the matrix, one box [128
//   128  | a | | c  wg 0 | 64      or 256 rows, 64 of k] is the tile. Where it runs across (a
//        |   | | c  wg 1 | 64      transposed, b as it is), boxes [64 of k, 64] lie side by side.
//        +---+ +---------+
//         64

#include <cuda_bf16.h>

#include "08_kernels/hopper.h"
#include "08_kernels/rung.h"
#include "08_kernels/tiles.h"
#include "common/kernels_cuda.h"

namespace lockstep::ladder {

constexpr int kTileM = 128, kTileN = 256, kTileK = 64;
constexpr int kConsumers = 2, kThreads = 128 * (1 + kConsumers);
constexpr int kBox = 64 * kTileK;  // elements of a box [64, 64]

struct Stage {
  alignas(1024) bf16 a[kTileM * kTileK];
  alignas(1024) bf16 b[kTileN * kTileK];
};

// The product of one stage, a whole group: 64 rows of a, beginning at `a`.
template <bool TransposedA, bool TransposedB>
__device__ void multiply(float (&sum)[128], uint32_t a, uint32_t b, bool add) {
  hopper::begin_products();
#pragma unroll
  for (int k = 0; k < kTileK; k += 16)  // 16 bytes: 8 elements
    hopper::multiply_16_deep<TransposedA, TransposedB>(
        sum, a + (TransposedA ? k * 64 : k) / 8, b + (TransposedB ? k * 64 : k) / 8, add || k > 0);
  hopper::commit_products();
}
constexpr int kBoxBytes = kBox * int(sizeof(bf16));
template <bool TransposedA, bool TransposedB>
__device__ void multiply(float (&sum)[128], const bf16* a, const bf16* b, bool add) {
  multiply<TransposedA, TransposedB>(sum, hopper::tile_at(a, kBoxBytes),
                                     hopper::tile_at(b, kBoxBytes), add);
}

// A map of op(a) or op(b)^T, [outer, k], as it lies in memory; boxes are 64 elements wide.
inline CUtensorMap operand_map(const void* matrix, int64_t outer, int64_t k, bool k_along_rows,
                               int box_rows) {
  return hopper::tensor_map(matrix, DType::BF16, k_along_rows ? outer : k, k_along_rows ? k : outer,
                            box_rows);
}

inline bool fits_tma(const Matmul& p) {
  bool ta = p.ta == Op::T, tb = p.tb == Op::T;
  return p.in == DType::BF16 && hopper::fits_tma(p.a, p.in, ta ? p.k : p.m, ta ? p.m : p.k) &&
         hopper::fits_tma(p.b, p.in, tb ? p.n : p.k, tb ? p.k : p.n) &&
         hopper::fits_tma(p.c, p.out, p.m, p.n);
}
inline bool fits_hopper(const Matmul& p) {
  return hopper::present() && fits_tma(p) && (p.beta == 0 || (p.beta == 1 && p.out == DType::F32));
}
// What the rungs below those take: k along the rows of both, bf16 into bf16.
inline bool plain_for_hopper(const Matmul& p) {
  return hopper::present() && fits_tma(p) && p.ta == Op::N && p.tb == Op::T && p.beta == 0 &&
         p.out == DType::BF16;
}

// A warpgroup's 64 x 256 sums straight from its registers: each thread has pairs of neighbours.
__device__ inline void store_pairs(bf16* c, int m, int n, int row, int column,
                                   const float (&sum)[128]) {
  int thread = threadIdx.x % 128, lane = thread % 32;
  row += thread / 32 * 16 + lane / 4;
  column += 2 * (lane % 4);
#pragma unroll
  for (int i = 0; i < 128; i += 2) {
    int r = row + (i & 2) * 4, col = column + i / 4 * 8;
    if (r < m && col < n)  // n is even
      *reinterpret_cast<__nv_bfloat162*>(c + int64_t(r) * n + col) =
          __floats2bfloat162_rn(sum[i], sum[i + 1]);
  }
}

// ---- Clusters of two blocks, whose tiles lie above each other ----

constexpr int kCluster = 2;

// One stage: this block's a and, for both blocks, its half of b. outer: the first row of a, the
// first column of b.
template <bool TransposedA, bool TransposedB>
__device__ void load_stage(Stage& stage, uint64_t* full, const CUtensorMap& a, const CUtensorMap& b,
                           int outer_a, int outer_b, int k, int rank) {
  hopper::arrive_expecting(full, sizeof(stage.a) + sizeof(stage.b));
  constexpr uint16_t both = (1 << kCluster) - 1;
  constexpr int half = kTileN / kCluster;
  bf16* half_b = stage.b + rank * half * kTileK;
  if constexpr (TransposedA) {
    for (int i = 0; i < kTileM / 64; ++i)
      hopper::load_box(stage.a + i * kBox, a, k, outer_a + i * 64, full);
  } else {
    hopper::load_box(stage.a, a, outer_a, k, full);
  }
  if constexpr (TransposedB) {
    hopper::load_box(half_b, b, outer_b + rank * half, k, full, both);
  } else {
    for (int i = 0; i < half / 64; ++i)
      hopper::load_box(half_b + i * kBox, b, k, outer_b + rank * half + i * 64, full, both);
  }
}

// The three matrices as TMA sees them.
struct Maps {
  CUtensorMap a, b, c;
};
inline Maps cluster_maps(const Matmul& p) {
  bool ta = p.ta == Op::T, tb = p.tb == Op::T;
  return {operand_map(p.a, p.m, p.k, !ta, ta ? kTileK : kTileM),
          operand_map(p.b, p.n, p.k, tb, tb ? kTileN / kCluster : kTileK),
          hopper::tensor_map(p.c, p.out, p.m, p.n, 16)};
}

// ---- Storing through shared memory ----
//
// A warp stores its 16 rows in panels 128 bytes wide: it lays a panel into a buffer, swizzled, lets
// the copy engine take it from there and goes on to the next. No other warp takes part, so nobody
// waits for anybody. A panel is 16 words of each thread; a word is one fp32 sum, or two as bf16.

constexpr int kPanelBytes = 16 * 128, kPanelWords = 16;

template <class Out>
constexpr int kSumsPerWord = 4 / int(sizeof(Out));
template <class Out>
constexpr int kPanelColumns = 128 / int(sizeof(Out));

template <class Out, int Words>
__device__ void to_words(uint32_t (&words)[Words], const float* sum) {
#pragma unroll
  for (int i = 0; i < Words; ++i) {
    if constexpr (sizeof(Out) == 4) {
      // A copy that the compiler sees as such: the sums' own registers go to the next products.
      asm volatile("mov.b32 %0, %1;" : "=r"(words[i]) : "f"(sum[i]));
    } else {
      __nv_bfloat162 pair = __floats2bfloat162_rn(sum[2 * i], sum[2 * i + 1]);
      memcpy(&words[i], &pair, sizeof(pair));
    }
  }
}

__device__ inline void lay_panel(bf16*, char* panel, const uint32_t* words) {
  int lane = threadIdx.x % 32, row = lane % 16, half = lane / 16;
#pragma unroll
  for (int i = 0; i < kPanelWords;
       i += 4) {  // 16 columns, two chunks; each lane names a row of one
    uint32_t at = hopper::shared_address(panel) + row * 128 + ((i / 2 + half) ^ row % 8) * 16;
    asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(at),
                 "r"(words[i]), "r"(words[i + 1]), "r"(words[i + 2]), "r"(words[i + 3])
                 : "memory");
  }
}
__device__ inline void lay_panel(float*, char* panel, const uint32_t* words) {
  int lane = threadIdx.x % 32, row = lane / 4, within = lane % 2 * 8;
#pragma unroll
  for (int i = 0; i < kPanelWords; i += 4) {  // 8 columns, two chunks
    char* at = panel + row * 128 + ((i / 2 + lane % 4 / 2) ^ row) * 16 + within;
    *reinterpret_cast<uint2*>(at) = {words[i], words[i + 1]};
    *reinterpret_cast<uint2*>(at + 8 * 128) = {words[i + 2], words[i + 3]};
  }
}

// Buffers: how many panels of this warp may be on their way.
template <class Out, int Buffers>
__device__ void store_panel(const CUtensorMap& c, int row, int column, const uint32_t* words,
                            char* panel, bool add) {
  bool first_lane = threadIdx.x % 32 == 0;
  if (first_lane) hopper::wait_stores<Buffers - 1>();  // whatever last used this buffer is gone
  __syncwarp();
  lay_panel(static_cast<Out*>(nullptr), panel, words);
  hopper::publish_to_tma();
  __syncwarp();
  if (!first_lane) return;
  if (sizeof(Out) == 4 && add)  // bf16 is never added to (fits_hopper)
    hopper::add_box(c, row, column, panel);
  else
    hopper::store_box(c, row, column, panel);
  hopper::commit_stores();
}

// Panels side by side, from [row, column] of c on. buffers: this warp's own.
template <class Out, int Buffers, int Panels>
__device__ void store_panels(const CUtensorMap& c, int row, int column, const float* sum,
                             char* buffers, bool add) {
#pragma unroll
  for (int i = 0; i < Panels; ++i) {
    uint32_t words[kPanelWords];
    to_words<Out>(words, sum + i * kPanelWords * kSumsPerWord<Out>);
    store_panel<Out, Buffers>(c, row, column + i * kPanelColumns<Out>, words,
                              buffers + i % Buffers * kPanelBytes, add);
  }
}

// What the blocks of the clusters have in shared memory (from rung 6 on).
struct ClusterMemory {
  static constexpr int kStages = 4, kBuffers = 2;
  Stage stages[kStages];
  alignas(1024) char panels[4 * kConsumers][kBuffers * kPanelBytes];
  uint64_t full[kStages], empty[kStages];

  // No stage is full; both blocks know when this returns.
  __device__ void begin() {
    if (threadIdx.x == 0) {
      for (int i = 0; i < kStages; ++i) {
        hopper::init(&full[i], 1);
        hopper::init(&empty[i], kCluster * kConsumers * 4);
      }
      hopper::publish_barriers();
    }
    hopper::cluster_barrier();
  }
};

// ---- Holding a tile's result back (from rung 7 on) ----
//
// As many panels as fit into the registers that are left; of 128 sums the first kAtOnce do not. The
// consumers take turns in storing one panel with a step, so there have to be as many steps (behind
// the end of k, TMA reads zeros).

constexpr int kHeldPanels = 4, kHeldWords = kHeldPanels * kPanelWords;
constexpr int kHeldSteps = kHeldPanels * kConsumers;
template <class Out>
constexpr int kAtOnce = 128 - kHeldWords* kSumsPerWord<Out>;

inline int steps_of(const Matmul& p) {
  int steps = int(tiles(p.k, kTileK));
  return steps < kHeldSteps ? kHeldSteps : steps;
}

// Turns what a product is into template arguments: f(ta, tb, a zero of the result's type).
template <class F>
void with_form(const Matmul& p, F&& f) {
  cuda::branch(p.ta == Op::T, [&](auto ta) {
    cuda::branch(p.tb == Op::T,
                 [&](auto tb) { cuda::for_type(p.out, [&](auto out) { f(ta, tb, out); }); });
  });
}

}  // namespace lockstep::ladder
