// Rung 8, pipelined: the next tiles are on their way while this one is multiplied.
//
//     fetch      tile 0  tile 1  tile 2  tile 3  tile 4          kStages tiles have room in shared
//     multiply                   tile 0  tile 1  tile 2  …       memory
//
// On the rung before, ncu shows warps that wait at the barrier and for global memory: the block
// fetches, then multiplies, and while it does one the other stands still. cp.async (since A100)
// copies from global to shared memory without a register and without waiting; a group of such
// copies is committed, and waited for two tiles later. One barrier for each tile is enough: what it
// releases for overwriting is the tile before.
//
// A copy cannot turn a tile on its way. as[row][i] lies as in global memory, and a thread reads
// four steps of i at once, 16 bytes again. Rows are padded by 4 numbers, so that the 8 rows which
// the lanes of a warp read begin in different banks. Each thread computes 8 x 16 sums: 24 reads for
// 512 products.

#include "08_kernels/sgemm.h"
#include "common/kernels_cuda.h"

namespace lockstep::ladder {

template <int kWarpsY, int kWarpsX, int kSumsX, int kDepth_, int kStages_>
struct Shape8 {
  static constexpr int kDepth = kDepth_, kStages = kStages_;
  static constexpr int kSumsY = 8, kX = kSumsX;
  static constexpr int kRows = kWarpsY * 64, kColumns = kWarpsX * 4 * kSumsX;
  static constexpr int kThreads = 32 * kWarpsY * kWarpsX, kWX = kWarpsX;
  static constexpr int kARow = kDepth + 4;
  static constexpr int kA = kRows * kARow, kB = kDepth * kColumns;
  static constexpr int kBytes = (kA + kB) * kStages * 4;
};
using Four = cuda::Pack<float, 4>;

// Four numbers of a matrix into shared memory, zeros for those outside of it.
template <bool Even>
static __device__ void copy_async(float* to, const float* matrix, int rows, int columns, int y,
                                  int x) {
  unsigned shared = unsigned(__cvta_generic_to_shared(to));
  const float* from = matrix + int64_t(y) * columns + x;
  if constexpr (Even) {
    bool inside = y < rows && x < columns;
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(shared),
                 "l"(inside ? from : matrix), "r"(inside ? 16 : 0));
  } else {
    for (int i = 0; i < 4; ++i) {
      bool inside = y < rows && x + i < columns;
      asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;" ::"r"(shared + 4 * i),
                   "l"(inside ? from + i : matrix), "r"(inside ? 4 : 0));
    }
  }
}

template <class S, int kMap, bool Even>
static __global__ void __launch_bounds__(S::kThreads)
    pipelined_kernel(float* c, const float* a, const float* b, int m, int n, int k) {
  extern __shared__ __align__(16) float stages[];
  int row = blockIdx.y * S::kRows, column = blockIdx.x * S::kColumns;
  auto fetch = [&](int tile) {
    float* as = stages + tile % S::kStages * (S::kA + S::kB);
    float* bs = as + S::kA;
    int first = tile * S::kDepth;
    if (first < k) {
      constexpr int kAGroups = S::kDepth / 4, kBGroups = S::kColumns / 4;
#pragma unroll
      for (int i = threadIdx.x; i < S::kRows * kAGroups; i += S::kThreads) {
        int y = i / kAGroups, x = i % kAGroups * 4;
        copy_async<Even>(as + y * S::kARow + x, a, m, k, row + y, first + x);
      }
#pragma unroll
      for (int i = threadIdx.x; i < S::kDepth * kBGroups; i += S::kThreads) {
        int y = i / kBGroups, x = i % kBGroups * 4;
        copy_async<Even>(bs + y * S::kColumns + x, b, k, n, first + y, column + x);
      }
    }
    asm volatile("cp.async.commit_group;");
  };
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  int ly = kMap == 0 ? lane / 4 : kMap == 1 ? lane % 8 : lane / 8 * 2 + lane % 2;
  int lx = kMap == 0 ? lane % 4 : kMap == 1 ? lane / 8 : lane % 8 / 2;
  int y = warp / S::kWX * 64 + ly;
  int x = warp % S::kWX * 4 * S::kX + lx * 4;
  float sums[S::kSumsY][S::kX] = {};
  for (int tile = 0; tile < S::kStages - 1; ++tile) fetch(tile);
  int tiles = (k + S::kDepth - 1) / S::kDepth;
  for (int tile = 0; tile < tiles; ++tile) {
    asm volatile("cp.async.wait_group %0;" ::"n"(S::kStages - 2) : "memory");
    __syncthreads();
    fetch(tile + S::kStages - 1);
    const float* as = stages + tile % S::kStages * (S::kA + S::kB) + y * S::kARow;
    const float* bs = stages + tile % S::kStages * (S::kA + S::kB) + S::kA + x;
#pragma unroll
    for (int four = 0; four < S::kDepth; four += 4) {
      Four left[S::kSumsY];
#pragma unroll
      for (int s = 0; s < S::kSumsY; ++s)
        left[s] = *reinterpret_cast<const Four*>(as + s * 8 * S::kARow + four);
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        Four right[S::kX / 4];
#pragma unroll
        for (int t = 0; t < S::kX / 4; ++t)
          right[t] = *reinterpret_cast<const Four*>(bs + (four + i) * S::kColumns + t * 16);
#pragma unroll
        for (int s = 0; s < S::kSumsY; ++s)
#pragma unroll
          for (int t = 0; t < S::kX; ++t) sums[s][t] += left[s].at[i] * right[t / 4].at[t % 4];
      }
    }
  }
#pragma unroll
  for (int s = 0; s < S::kSumsY; ++s)
#pragma unroll
    for (int t = 0; t < S::kX; t += 4) {
      int at_y = row + y + s * 8, at_x = column + x + t * 4;
      Four four = {sums[s][t], sums[s][t + 1], sums[s][t + 2], sums[s][t + 3]};
      if (at_y < m && at_x < n) cuda::store<Even>(c + int64_t(at_y) * n + at_x, n - at_x, four);
    }
}

template <class S, int kMap>
static MatmulRung make(const char* name) {
  return sgemm_rung(name, "copies run ahead", pipelined_kernel<S, kMap, false>,
                    {S::kRows, S::kColumns, S::kThreads, S::kBytes},
                    pipelined_kernel<S, kMap, true>);
}

MatmulRung sgemm_pipelined() { return make<Shape8<2, 4, 16, 16, 3>, 0>("pipelined"); }

std::vector<MatmulRung> variants() {
  return {
      make<Shape8<2, 4, 16, 16, 3>, 0>("128x256 256t d16 s3 map0"),
      make<Shape8<2, 4, 16, 16, 3>, 1>("128x256 256t d16 s3 map1"),
      make<Shape8<2, 4, 16, 16, 3>, 2>("128x256 256t d16 s3 map2"),
      make<Shape8<2, 4, 16, 32, 3>, 2>("128x256 256t d32 s3 map2"),
      make<Shape8<2, 2, 16, 16, 3>, 0>("128x128 128t d16 s3 map0"),
      make<Shape8<2, 2, 16, 16, 3>, 2>("128x128 128t d16 s3 map2"),
      make<Shape8<2, 2, 16, 16, 4>, 2>("128x128 128t d16 s4 map2"),
      make<Shape8<2, 4, 8, 16, 3>, 0>("128x128 256t d16 s3 map0"),
      make<Shape8<2, 4, 8, 16, 3>, 2>("128x128 256t d16 s3 map2"),
      make<Shape8<2, 4, 8, 32, 3>, 2>("128x128 256t d32 s3 map2"),
      make<Shape8<4, 2, 16, 16, 3>, 2>("256x128 256t d16 s3 map2"),
  };
}

}  // namespace lockstep::ladder
