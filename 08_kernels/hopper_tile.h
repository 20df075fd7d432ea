#pragma once
// What the Hopper rungs of the matmul share. A block computes a tile of c in steps along k:
//
//                  256                 a tile [128, 64] and b tile [64, 256] make one stage: 48 KB.
//              +---------+             Two consumer warpgroups hold the sum, 64 rows each.
//          k   |    b    |
//              +---------+             In shared memory a tile consists of boxes whose rows have
//              128
//        +---+ +---------+             bytes. Where k runs along the rows of the matrix, one box
//   128  | a | | c  wg 0 | 64          [128 or 256 rows, 64 of k] is the tile. Where it runs across
//        |   | | c  wg 1 | 64          (a transposed, b as it is), boxes [64 of k, 64] lie side by
//        +---+ +---------+             side.
//         64

#include <cuda_bf16.h>

#include "08_kernels/hopper.h"
#include "08_kernels/rung.h"
#include "08_kernels/tiles.h"

namespace lockstep::ladder {

constexpr int kTileM = 128, kTileN = 256, kTileK = 64;
constexpr int kConsumers = 2, kThreads = 128 * (1 + kConsumers);
constexpr int kBox = 64 * kTileK;  // elements of a box [64, 64]

struct Stage {
  alignas(1024) bf16 a[kTileM * kTileK];
  alignas(1024) bf16 b[kTileN * kTileK];
};

// The product of one stage: 64 rows of a, beginning at `a`.
template <bool TransposedA, bool TransposedB, int Sums>
__device__ void multiply_stage(float (&sum)[Sums], const bf16* a, const bf16* b, bool add) {
  constexpr int next = kBox * int(sizeof(bf16));
#pragma unroll
  for (int k = 0; k < kTileK; k += 16)
    hopper::multiply_16_deep<TransposedA, TransposedB>(
        sum, hopper::tile_at(a + (TransposedA ? k * 64 : k), next),
        hopper::tile_at(b + (TransposedB ? k * 64 : k), next), add || k > 0);
}
template <bool TransposedA, bool TransposedB>  // the same as a whole group
__device__ void multiply(float (&sum)[128], const bf16* a, const bf16* b, bool add) {
  hopper::begin_products();
  multiply_stage<TransposedA, TransposedB>(sum, a, b, add);
  hopper::commit_products();
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

// ---- Storing through shared memory ----
//
// A warp stores its 16 rows in panels 128 bytes wide: it lays a panel into a buffer, swizzled, lets
// the copy engine take it from there and goes on to the next. No other warp takes part, so nobody
// waits for anybody.

constexpr int kPanelBytes = 16 * 128;

// Four 8 x 8 matrices of bf16 in one instruction: each lane names a row of one.
__device__ inline void store_matrices(uint32_t row, const float* sum) {
  uint32_t pairs[4];
#pragma unroll
  for (int i = 0; i < 4; ++i) {
    __nv_bfloat162 pair = __floats2bfloat162_rn(sum[2 * i], sum[2 * i + 1]);
    memcpy(&pairs[i], &pair, sizeof(pair));
  }
  asm volatile("stmatrix.sync.aligned.m8n8.x4.shared.b16 [%0], {%1, %2, %3, %4};" ::"r"(row),
               "r"(pairs[0]), "r"(pairs[1]), "r"(pairs[2]), "r"(pairs[3])
               : "memory");
}

// sum: what this thread has of the panel.
__device__ inline void lay_panel(bf16*, char* panel, const float* sum) {
  int lane = threadIdx.x % 32, row = lane % 16, half = lane / 16;
#pragma unroll
  for (int i = 0; i < 4; ++i)  // 16 columns, two chunks
    store_matrices(hopper::shared_address(panel) + row * 128 + ((2 * i + half) ^ row % 8) * 16,
                   sum + 8 * i);
}
__device__ inline void lay_panel(float*, char* panel, const float* sum) {
  int lane = threadIdx.x % 32, row = lane / 4, within = lane % 2 * 8;
#pragma unroll
  for (int i = 0; i < 4; ++i) {  // 8 columns, two chunks
    char* at = panel + row * 128 + ((2 * i + lane % 4 / 2) ^ row) * 16 + within;
    *reinterpret_cast<float2*>(at) = {sum[4 * i], sum[4 * i + 1]};
    *reinterpret_cast<float2*>(at + 8 * 128) = {sum[4 * i + 2], sum[4 * i + 3]};
  }
}

// The 16 rows of a warp, two columns for each sum, go to [row, column] of c. buffers: this warp's
// own.
template <class Out, int Buffers, int Sums>
__device__ void store_panels(const CUtensorMap& c, int row, int column, const float (&sum)[Sums],
                             char* buffers, bool add) {
  constexpr int width = 128 / int(sizeof(Out));
  bool first_lane = threadIdx.x % 32 == 0;
#pragma unroll
  for (int i = 0; i < 2 * Sums / width; ++i) {
    char* panel = buffers + i % Buffers * kPanelBytes;
    if (first_lane) hopper::wait_stores<Buffers - 1>();  // whatever last used this buffer is gone
    __syncwarp();
    lay_panel(static_cast<Out*>(nullptr), panel, sum + i * width / 2);
    hopper::publish_to_tma();
    __syncwarp();
    if (!first_lane) continue;
    if (add)
      hopper::add_box(c, row, column + i * width, panel);
    else
      hopper::store_box(c, row, column + i * width, panel);
    hopper::commit_stores();
  }
}

}  // namespace lockstep::ladder
