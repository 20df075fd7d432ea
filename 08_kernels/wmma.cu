// Rung 1, wmma: tensor cores through C++.
//
// A tensor core multiplies two 16 x 16 matrices at once. nvcuda::wmma shows it as a type: a warp
// loads two fragments from shared memory, multiplies them and adds to a third. Which thread holds
// which element is nobody's business, so the result, too, goes through shared memory.
//
//     64 x 64 of c for a block of four warps, each with 32 x 32: two by two fragments
//
// Compared with the fp32 ladder, this is its shared-memory tile with a faster inner loop. Tiles are
// copied element by element, with zeros outside of the matrix, so any size is right.

#include <mma.h>

#include "08_kernels/bf16_ladder.h"
#include "08_kernels/tiles.h"
#include "common/kernels_cuda.h"

namespace lockstep::ladder {

namespace {

namespace wmma = nvcuda::wmma;

constexpr int kTile = 64, kTileK = 32, kThreads = 128;
constexpr int kPitch = kTileK + 8;  // rows of a tile begin in different banks

// tile[outer][k] = op(a) or op(b)^T, which is [size, k] and begins at `first`. Neighbouring threads
// read neighbouring elements of the matrix.
template <bool KRows>
__device__ void copy_tile(bf16 (*tile)[kPitch], const bf16* matrix, int64_t size, int64_t k,
                          int64_t first, int64_t at) {
  for (int i = threadIdx.x; i < kTile * kTileK; i += kThreads) {
    int outer = KRows ? i / kTileK : i % kTile, depth = KRows ? i % kTileK : i / kTile;
    int64_t o = first + outer, d = at + depth;
    bool inside = o < size && d < k;
    tile[outer][depth].bits = inside ? matrix[KRows ? o * k + d : d * size + o].bits : uint16_t(0);
  }
}

template <bool TA, bool TB, class Out>
__global__ void __launch_bounds__(kThreads)
    wmma_kernel(const bf16* a, const bf16* b, Out* c, int64_t m, int64_t n, int64_t k, float beta) {
  __shared__ __align__(16) bf16 tile_a[kTile][kPitch], tile_b[kTile][kPitch];
  __shared__ __align__(16) float result[kTile][kTile];
  const int64_t row = int64_t(blockIdx.y) * kTile, column = int64_t(blockIdx.x) * kTile;
  const int warp_row = threadIdx.x / 64 * 32, warp_column = threadIdx.x / 32 % 2 * 32;
  auto native = [](bf16* p) { return reinterpret_cast<__nv_bfloat16*>(p); };

  wmma::fragment<wmma::accumulator, 16, 16, 16, float> sum[2][2];
  for (auto& fragments : sum)
    for (auto& f : fragments) wmma::fill_fragment(f, 0.0f);
  for (int64_t at = 0; at < k; at += kTileK) {
    copy_tile<!TA>(tile_a, a, m, k, row, at);
    copy_tile<TB>(tile_b, b, n, k, column, at);
    __syncthreads();
    for (int depth = 0; depth < kTileK; depth += 16) {
      wmma::fragment<wmma::matrix_a, 16, 16, 16, __nv_bfloat16, wmma::row_major> fa[2];
      wmma::fragment<wmma::matrix_b, 16, 16, 16, __nv_bfloat16, wmma::col_major> fb[2];
      for (int i = 0; i < 2; ++i) {
        wmma::load_matrix_sync(fa[i], native(&tile_a[warp_row + 16 * i][depth]), kPitch);
        wmma::load_matrix_sync(fb[i], native(&tile_b[warp_column + 16 * i][depth]), kPitch);
      }
      for (int i = 0; i < 2; ++i)
        for (int j = 0; j < 2; ++j) wmma::mma_sync(sum[i][j], fa[i], fb[j], sum[i][j]);
    }
    __syncthreads();
  }

  for (int i = 0; i < 2; ++i)
    for (int j = 0; j < 2; ++j)
      wmma::store_matrix_sync(&result[warp_row + 16 * i][warp_column + 16 * j], sum[i][j], kTile,
                              wmma::mem_row_major);
  __syncthreads();
  for (int i = threadIdx.x; i < kTile * kTile; i += kThreads) {
    int64_t r = row + i / kTile, col = column + i % kTile;
    if (r >= m || col >= n) continue;
    float x = result[i / kTile][i % kTile];
    if (beta != 0) x += beta * float(c[r * n + col]);
    c[r * n + col] = cuda::rounded<Out>(x);
  }
}

void launch(const Matmul& p, cudaStream_t stream) {
  if (p.m * p.n == 0) return;
  dim3 grid(unsigned(tiles(p.n, kTile)), unsigned(tiles(p.m, kTile)));
  cuda::branch(p.ta == Op::T, [&](auto ta) {
    cuda::branch(p.tb == Op::T, [&](auto tb) {
      cuda::for_type(p.out, [&](auto out) {
        using Out = decltype(out);
        wmma_kernel<ta(), tb(), Out><<<grid, kThreads, 0, stream>>>(
            static_cast<const bf16*>(p.a), static_cast<const bf16*>(p.b), static_cast<Out*>(p.c),
            p.m, p.n, p.k, p.beta);
        check(cudaGetLastError());
      });
    });
  });
}

}  // namespace

MatmulRung wmma_rung() {
  return {"wmma", "tensor cores on tiles of shared memory",
          [](const Matmul& p) {
            return p.in == DType::BF16 && tiles(p.m, kTile) <= cuda::kMostGridRows;
          },
          launch};
}

}  // namespace lockstep::ladder
