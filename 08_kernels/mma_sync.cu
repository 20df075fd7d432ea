// Rung 2, mma.sync + cp.async: the tensor cores' own instruction, and copies that do not wait.
//
// The rung before reaches 4 % of the library (31 TFLOP/s at 4096^3 on an H200): a thread loads two
// bytes into a register, waits, and writes them to shared memory, and all wait for all. cp.async
// moves 16 bytes from global to shared memory without a register and without waiting. A ring of
// stages is filled while an older stage is multiplied:
//
//     copy      stage 0  1  2 | 3   0   1   2  ...
//     multiply                | 0   1   2   3  ...
//
// mma.sync m16n8k16 has fragments in registers whose layout is documented, and ldmatrix loads them:
// four 8 x 8 matrices in one instruction, transposed on the way where the rows of the tile run
// along m or n instead of k. A warp computes 64 x 64, so that it reads each value from shared
// memory for 64 products. Chunks of 16 bytes are permuted within each row of a tile (swizzled) so
// that the eight rows that ldmatrix reads lie in different banks.
//
// What the profiler taught here: the first version executed 4.3 instructions for each mma, and the
// tensor cores were busy for half of the time. An mma wants its two values of b in neighbouring
// registers, and ldmatrix had put them apart, so the compiler moved them; now KFirst names the
// matrices in the right order. With that, and with fragments loaded a step ahead, it went from 0.36
// to 0.48 of the library. mma.sync can have at most about 0.65 of a Hopper's tensor cores.
//
// It runs on every GPU since A100 and takes everything: any size and alignment, transposed or not,
// any beta. Where 16-byte copies are impossible, threads copy element by element.

#include "08_kernels/bf16_ladder.h"
#include "08_kernels/tiles.h"
#include "common/kernels_cuda.h"

namespace lockstep::ladder {

namespace {

constexpr int kTileK = 64, kWarpTile = 64;
constexpr int kGroup = 8;

// Eight elements, of which `count` exist. Even: all or none of them do.
template <bool Even>
__device__ void copy_chunk(bf16* to, const bf16* from, int count) {
  if constexpr (Even) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(
                     uint32_t(__cvta_generic_to_shared(to))),
                 "l"(from), "r"(count * 2)
                 : "memory");
  } else {
#pragma unroll
    for (int k = 0; k < 8; ++k) to[k].bits = k < count ? from[k].bits : uint16_t(0);
  }
}

// A tile [Outer, kTileK] of op(a) or op(b)^T in shared memory, as it lies in the matrix: KRows says
// that k runs along its rows.
template <int Outer, bool KRows>
struct Tile {
  static constexpr int kRows = KRows ? Outer : kTileK;
  static constexpr int kChunks = (KRows ? kTileK : Outer) / 8;  // in a row
  bf16 data[Outer * kTileK];

  __device__ bf16* chunk(int row, int column) {  // column counts chunks
    int swizzle = kChunks == 4 ? row / 2 % 4 : row % 8;
    return data + (row * kChunks + (column ^ swizzle)) * 8;
  }

  // What one thread copies of each tile of a matrix [rows, columns]: chunks that lie `kPass` rows
  // below each other, first those of the tile at [row, column], then, with every copy(), those of
  // the next one along k. What lies outside of the matrix becomes zero.
  template <int Threads, bool Even>
  struct Source {
    static constexpr int kPass = Threads / kChunks;
    static_assert(kPass % 8 == 0);  // so they are all swizzled alike
    const bf16* from;
    int64_t next;
    int below, rows_left, columns_left;

    __device__ Source(const bf16* matrix, int rows, int columns, int row, int column) {
      row += threadIdx.x / kChunks;
      column += threadIdx.x % kChunks * 8;
      from = matrix + int64_t(row) * columns + column;
      below = kPass * columns;
      next = KRows ? kTileK : int64_t(kTileK) * columns;
      rows_left = rows - row;
      columns_left = columns - column;
    }
    __device__ void copy(Tile& tile) {
      bf16* to = tile.chunk(threadIdx.x / kChunks, threadIdx.x % kChunks);
#pragma unroll
      for (int i = 0; i < kRows / kPass; ++i) {
        bool inside = i * kPass < rows_left && columns_left > 0;
        copy_chunk<Even>(to + i * kPass * kChunks * 8, from + int64_t(below) * i,
                         !inside ? 0
                         : Even  ? 8
                                 : min(columns_left, 8));
      }
      from += next;
      (KRows ? columns_left : rows_left) -= kTileK;
    }
  };

  // Four 8 x 8 matrices, in the order in which mma wants them: for a [outer, k], [outer + 8, k],
  // [outer, k + 8], [outer + 8, k + 8]; for b (KFirst) the second and the third change places.
  template <bool KFirst>
  __device__ void fragment(uint32_t (&f)[4], int outer, int k) {
    int lane = threadIdx.x % 32, slow = lane / 16, fast = lane / 8 % 2;
    outer += (KFirst ? slow : fast) * 8;
    k += (KFirst ? fast : slow) * 8;
    if constexpr (KRows) {
      uint32_t at = uint32_t(__cvta_generic_to_shared(chunk(outer + lane % 8, k / 8)));
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3])
                   : "r"(at));
    } else {
      uint32_t at = uint32_t(__cvta_generic_to_shared(chunk(k + lane % 8, outer / 8)));
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3])
                   : "r"(at));
    }
  }
};

// sum [16, 8] += a [16, 16] b [16, 8]
__device__ void mma(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7},"
      " {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Two neighbours in a row of c. whole: both are inside, and may be moved in one access.
template <class Out>
__device__ void store_pair(Out* c, bool whole, bool second, float x, float y, float beta) {
  if (beta != 0) {
    x += beta * float(c[0]);
    if (second) y += beta * float(c[1]);
  }
  if (whole) {
    struct alignas(2 * sizeof(Out)) Pair {
      Out x, y;
    };
    *reinterpret_cast<Pair*>(c) = {cuda::rounded<Out>(x), cuda::rounded<Out>(y)};
    return;
  }
  c[0] = cuda::rounded<Out>(x);
  if (second) c[1] = cuda::rounded<Out>(y);
}

template <int TileM, int TileN, int Stages, int Blocks, bool TA, bool TB, class Out, bool Even>
__global__ void __launch_bounds__(TileM* TileN / 128, Blocks)
    mma_kernel(const bf16* a, const bf16* b, Out* c, int m, int n, int k, float beta,
               TileOrder order) {
  constexpr int threads = TileM * TileN / 128, steps = kWarpTile / 16;
  struct Stage {
    Tile<TileM, !TA> a;
    Tile<TileN, TB> b;
  };
  extern __shared__ __align__(128) char memory[];
  Stage* stages = reinterpret_cast<Stage*>(memory);
  int tile_row, tile_column;
  order.find(int(blockIdx.x), &tile_row, &tile_column);
  const int row = tile_row * TileM, column = tile_column * TileN;
  const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
  const int warp_row = warp % (TileM / kWarpTile) * kWarpTile;
  const int warp_column = warp / (TileM / kWarpTile) * kWarpTile;

  using TileA = Tile<TileM, !TA>;
  using TileB = Tile<TileN, TB>;
  typename TileA::template Source<threads, Even> source_a(a, TA ? k : m, TA ? m : k, TA ? 0 : row,
                                                          TA ? row : 0);
  typename TileB::template Source<threads, Even> source_b(b, TB ? n : k, TB ? k : n,
                                                          TB ? column : 0, TB ? 0 : column);
  auto copy_stage = [&](int step) {
    if (step * kTileK < k) {
      source_a.copy(stages[step % Stages].a);
      source_b.copy(stages[step % Stages].b);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");  // an empty one keeps the count right
  };

  // Two sets of fragments: one is loaded while the other is multiplied.
  constexpr int depths = kTileK / 16;
  uint32_t fa[2][steps][4], fb[2][steps][4];
  auto load_fragments = [&](int set, int step, int depth) {
    Stage& s = stages[step % Stages];
#pragma unroll
    for (int i = 0; i < steps; ++i) {
      s.a.template fragment<false>(fa[set][i], warp_row + 16 * i, depth * 16);
      s.b.template fragment<true>(fb[set][i], warp_column + 16 * i, depth * 16);
    }
  };
  auto wait_for_stage = [] {  // it is there for all, and all have read the one before this one
    asm volatile("cp.async.wait_group %0;" ::"n"(Stages - 2) : "memory");
    __syncthreads();
  };

  float sum[steps][2 * steps][4] = {};
  for (int i = 0; i < Stages - 1; ++i) copy_stage(i);
  wait_for_stage();
  load_fragments(0, 0, 0);
  for (int step = 0; step * kTileK < k; ++step) {
    copy_stage(step + Stages - 1);
#pragma unroll
    for (int depth = 0; depth < depths; ++depth) {
      bool last = depth == depths - 1;
      if (last) wait_for_stage();
      load_fragments((depth + 1) % 2, step + last, (depth + 1) % depths);
#pragma unroll
      for (int i = 0; i < steps; ++i)
#pragma unroll
        for (int j = 0; j < 2 * steps; ++j)
          mma(sum[i][j], fa[depth % 2][i], fb[depth % 2][j / 2][j % 2 * 2],
              fb[depth % 2][j / 2][j % 2 * 2 + 1]);
    }
  }

  const bool pairs = n % 2 == 0 && reinterpret_cast<uintptr_t>(c) % (2 * sizeof(Out)) == 0;
#pragma unroll
  for (int i = 0; i < steps; ++i)
#pragma unroll
    for (int j = 0; j < 2 * steps; ++j)
#pragma unroll
      for (int below = 0; below < 2; ++below) {
        int r = row + warp_row + 16 * i + 8 * below + lane / 4;
        int col = column + warp_column + 8 * j + 2 * (lane % 4);
        if (r < m && col < n)
          store_pair(c + int64_t(r) * n + col, pairs, col + 1 < n, sum[i][j][2 * below],
                     sum[i][j][2 * below + 1], beta);
      }
}

template <int TileM, int TileN, int Stages, int Blocks>
void launch(const Matmul& p, cudaStream_t stream) {
  if (p.m * p.n == 0) return;
  auto even = [](const void* matrix, int64_t columns) {
    return reinterpret_cast<uintptr_t>(matrix) % 16 == 0 && columns % 8 == 0;
  };
  TileOrder order{int(tiles(p.m, TileM)), int(tiles(p.n, TileN)), kGroup};
  bool all_even = even(p.a, p.ta == Op::T ? p.m : p.k) && even(p.b, p.tb == Op::T ? p.k : p.n);
  cuda::branch(p.ta == Op::T, [&](auto ta) {
    cuda::branch(p.tb == Op::T, [&](auto tb) {
      cuda::branch(all_even, [&](auto is_even) {
        cuda::for_type(p.out, [&](auto out) {
          using Out = decltype(out);
          auto kernel = mma_kernel<TileM, TileN, Stages, Blocks, ta(), tb(), Out, is_even()>;
          constexpr int shared = Stages * (TileM + TileN) * kTileK * int(sizeof(bf16));
          check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
          kernel<<<unsigned(order.count()), TileM * TileN / 128, shared, stream>>>(
              static_cast<const bf16*>(p.a), static_cast<const bf16*>(p.b), static_cast<Out*>(p.c),
              int(p.m), int(p.n), int(p.k), p.beta, order);
          check(cudaGetLastError());
        });
      });
    });
  });
}

}  // namespace

MatmulRung mma_sync() {
  return {"mma.sync + cp.async", "a ring of asynchronous copies, fragments by ldmatrix",
          [](const Matmul& p) { return p.in == DType::BF16; }, launch<128, 128, 3, 2>};
}

}  // namespace lockstep::ladder
