// Rung 8, pipelined: the next tiles are on their way while this one is multiplied.
//
//     fetch      tile 0  tile 1  tile 2  tile 3  tile 4          kStages tiles have room in shared
//     multiply                   tile 0  tile 1  tile 2  ...     memory
//
// On the rung before, ncu shows warps that wait at the barrier, for global memory ("Long
// Scoreboard") and for shared memory ("Short Scoreboard"): the block fetches, then multiplies, and
// while it does one the other stands still. Three things change:
//
//   - cp.async (since A100) copies from global to shared memory without a register and without
//     waiting. A tile's copies are spread over the steps of another tile's multiplication,
//     committed as a group, and waited for two tiles later. One barrier a tile is left.
//   - What a step multiplies is read from shared memory during the step before.
//   - A thread has 8 x 16 sums: 6 reads for 128 products, and only 8 warps on a multiprocessor.
//
// What limits it then is the register file, which ncu calls "Dispatch Stall". It has two banks, of
// even and of odd registers, and a multiplication that reads two operands from one bank takes about
// another cycle, unless the multiplication before left one of them in the reuse cache. How many do
// can be counted in the disassembly (cuobjdump --dump-sass) and depends on the order in which the
// products are written: 14 % as below, more than half with rows as the outer loop.

#include "08_kernels/sgemm.h"
#include "common/kernels_cuda.h"

namespace lockstep::ladder {

constexpr int kRows = 128, kColumns = 256, kDepth = 16, kStages = 3, kThreads = 256;
constexpr int kSumsY = 8, kSumsX = 16;
constexpr int kRowA = kRows + 4;  // a is turned, as[i][row], and padded as before
constexpr int kSizeA = kDepth * kRowA, kStage = kSizeA + kDepth * kColumns;  // numbers

// What a thread copies of each tile: single numbers of a (8 threads read 8 neighbours of a row, and
// write into different banks), groups of 4 of b.
constexpr int kStepA = kThreads / 8, kCopiesA = kRows / kStepA * (kDepth / 8);
constexpr int kStepB = kThreads / (kColumns / 4), kCopies = kCopiesA + kDepth / kStepB;
static_assert(kCopies < kDepth, "one copy in each step, and one step to commit them");

using Four = cuda::Pack<float, 4>;

// Copies a number, or four, or writes zeros where they are not inside the matrix.
template <int Bytes>
static __device__ void copy_async(float* to, const float* from, bool inside) {
  unsigned shared = unsigned(__cvta_generic_to_shared(to));
  if constexpr (Bytes == 16)
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared), "l"(from),
                 "r"(inside ? 16 : 0));
  else
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared), "l"(from),
                 "r"(inside ? 4 : 0));
}

template <bool Even>
static __global__ void __launch_bounds__(kThreads)
    pipelined_kernel(float* c, const float* a, const float* b, int m, int n, int k) {
  extern __shared__ __align__(16) float stages[];
  int row = blockIdx.y * kRows, column = blockIdx.x * kColumns;
  int a_y = threadIdx.x / 8, a_x = threadIdx.x % 8;
  int b_y = threadIdx.x / (kColumns / 4), b_x = threadIdx.x % (kColumns / 4) * 4;
  const float* from_a = a + int64_t(row + a_y) * k + a_x;
  const float* from_b = b + int64_t(b_y) * n + column + b_x;

  auto fetch = [&](int tile, int copy) {
    float* stage = stages + tile % kStages * kStage;
    int first = tile * kDepth;
    if (copy < kCopiesA) {
      int y = copy % (kRows / kStepA) * kStepA, x = copy / (kRows / kStepA) * 8;
      copy_async<4>(stage + (a_x + x) * kRowA + a_y + y, from_a + int64_t(y) * k + first + x,
                    row + a_y + y < m && first + a_x + x < k);
    } else {
      int y = (copy - kCopiesA) * kStepB;
      float* to = stage + kSizeA + (b_y + y) * kColumns + b_x;
      const float* from = from_b + int64_t(first + y) * n;
      int left = first + b_y + y < k ? n - column - b_x : 0;
      if constexpr (Even)
        copy_async<16>(to, from, left > 0);
      else
        for (int i = 0; i < 4; ++i) copy_async<4>(to + i, from + i, i < left);
    }
  };
  auto commit = [] { asm volatile("cp.async.commit_group;"); };
  auto await = [] {  // all but the last kStages - 2 groups have come, for all threads
    asm volatile("cp.async.wait_group %0;" ::"n"(kStages - 2) : "memory");
    __syncthreads();
  };

  // The warp tile of the rung before, 64 x 64: rows y + 0..3 and y + 32 + 0..3, columns x + 0..3
  // and so on, 16 apart. Of two neighbouring lanes one shares its columns, of the next two its rows
  // with them, so that one access serves several lanes.
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int y = warp / (kColumns / 64) * 64 + (lane / 8 * 2 + lane % 2) * 4;
  int x = warp % (kColumns / 64) * 64 + lane % 8 / 2 * 4;
  Four left[2][kSumsY / 4], right[2][kSumsX / 4];  // of this step and of the next
  auto read = [&](const float* stage, int i, int into) {
#pragma unroll
    for (int s = 0; s < kSumsY / 4; ++s)
      left[into][s] = *reinterpret_cast<const Four*>(stage + i * kRowA + y + s * 32);
#pragma unroll
    for (int t = 0; t < kSumsX / 4; ++t)
      right[into][t] = *reinterpret_cast<const Four*>(stage + kSizeA + i * kColumns + x + t * 16);
  };

  float sums[kSumsY][kSumsX] = {};
  for (int tile = 0; tile < kStages - 1; ++tile) {
    for (int copy = 0; copy < kCopies; ++copy) fetch(tile, copy);
    commit();
  }
  await();
  read(stages, 0, 0);
  int tiles = (k + kDepth - 1) / kDepth;
  for (int tile = 0; tile < tiles; ++tile) {
    const float* now = stages + tile % kStages * kStage;
    const float* next = stages + (tile + 1) % kStages * kStage;
#pragma unroll
    for (int i = 0; i < kDepth; ++i) {
      bool last = i + 1 == kDepth;
      if (i < kCopies) fetch(tile + kStages - 1, i);  // into the room of the tile before
      if (i + 2 == kDepth) commit();
      if (last) await();
      read(last ? next : now, (i + 1) % kDepth, (i + 1) % 2);
#pragma unroll
      for (int t = 0; t < kSumsX; ++t)
#pragma unroll
        for (int j = 0; j < kSumsY; ++j) {  // rows 0 4 1 5 2 6 3 7, and back for the next column
          int turn = t % 2 ? kSumsY - 1 - j : j, s = turn / 2 + turn % 2 * 4;
          sums[s][t] += left[i % 2][s / 4].at[s % 4] * right[i % 2][t / 4].at[t % 4];
        }
    }
  }
#pragma unroll
  for (int s = 0; s < kSumsY; ++s)
#pragma unroll
    for (int t = 0; t < kSumsX; t += 4) {
      int at_y = row + y + s / 4 * 32 + s % 4, at_x = column + x + t * 4;
      Four four = {sums[s][t], sums[s][t + 1], sums[s][t + 2], sums[s][t + 3]};
      if (at_y < m && at_x < n) cuda::store<Even>(c + int64_t(at_y) * n + at_x, n - at_x, four);
    }
}

MatmulRung sgemm_pipelined() {
  return sgemm_rung("pipelined", "copies run ahead", pipelined_kernel<false>,
                    {kRows, kColumns, kThreads, kStages * kStage * int(sizeof(float))},
                    pipelined_kernel<true>);
}

}  // namespace lockstep::ladder
