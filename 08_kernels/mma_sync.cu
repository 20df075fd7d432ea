// Rung 2, mma.sync + cp.async: the tensor cores' own instruction, and copies that do not wait.
//
// The rung before reaches 4 % of the library (31 TFLOP/s at 4096^3 on an H200): a thread loads two
// bytes into a register, waits, and writes them to shared memory, and all wait for all. cp.async
// moves 16 bytes from global to shared memory without a register and without waiting. A ring of
// stages is filled while an older stage is multiplied:
//
//     copy      stage 0  1 | 2   0   1   2  ...
//     multiply             | 0   1   2   0  ...
//
// mma.sync m16n8k16 has fragments in registers whose layout is documented, and ldmatrix loads them:
// four 8 x 8 matrices in one instruction, transposed on the way where the rows of the tile run
// along m or n instead of k. Chunks of 16 bytes are permuted within each row of a tile (swizzled)
// so that the eight rows that ldmatrix reads lie in different banks.
//
// For 16 numbers along k of a block's tile the tensor cores need 384 cycles (an m16n8k16 takes 6,
// measured alone). In these, shared memory is busy for 256 with fragments, since 64 x 64 sums are
// all that a warp's registers hold, and for 96 with copies. It keeps up only if this is spread
// evenly and never pauses (gains at 4096^3, as measured alone):
//   - Of a depth's four rows of 8 products, the first two load the next depth's fragments; copies
//     come with the last, where no load has to queue behind them: 2 %.
//   - A block takes tile after tile, and the ring stays full: during the last steps of a tile, the
//     first of the next are copied: 1 %, and 5 % at k = 1024.
//   - In a tile that lies inside of c, no element is tested for that: 1.5 %.
// What is left is copies: without them the kernel has 0.66 of the library, and mma alone, from
// registers, 0.69. A copy in each row loses 4 %; a fourth stage, or an mbarrier in place of
// __syncthreads(), gains nothing.
//
// It runs on every GPU since A100 and takes any size and alignment, transposed or not, any beta.
// Where 16-byte copies are impossible, threads copy element by element.

#include "08_kernels/bf16_ladder.h"
#include "08_kernels/tiles.h"
#include "common/kernels_cuda.h"

namespace lockstep::ladder {

namespace {

constexpr int kTileM = 128, kTileN = 256, kTileK = 64, kWarpTile = 64, kGroup = 8;
constexpr int kThreads = kTileM / kWarpTile * (kTileN / kWarpTile) * 32;
constexpr int kSteps = kWarpTile / 16, kDepths = kTileK / 16;  // an mma is 16 long
constexpr int kStageBytes = (kTileM + kTileN) * kTileK * int(sizeof(bf16));

// Eight elements, of which `count` exist. Even: all or none of them do.
template <bool Even>
__device__ void copy_chunk(uint32_t to, const bf16* from, int count) {
  if constexpr (Even) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from),
                 "r"(count * 2)
                 : "memory");
  } else {
#pragma unroll
    for (int k = 0; k < 8; ++k)
      asm volatile("st.shared.u16 [%0], %1;" ::"r"(to + 2 * k),
                   "h"(k < count ? from[k].bits : uint16_t(0))
                   : "memory");
  }
}

// A tile [Outer, kTileK] of op(a) or op(b)^T in shared memory, as it lies in the matrix: KRows says
// that k runs along its rows. Places are counted in bytes from its begin.
template <int Outer, bool KRows>
struct Tile {
  static constexpr int kRows = KRows ? Outer : kTileK, kBytes = Outer * kTileK * 2;
  static constexpr int kRowBytes = kBytes / kRows, kChunks = kRowBytes / 16;

  __device__ static uint32_t chunk(int row, int column) {  // column counts chunks
    return uint32_t(row * kRowBytes + (column ^ row % 8) * 16);
  }

  // What one thread copies of each tile of a matrix [rows, columns]: kCount chunks that lie kPass
  // rows below each other, first those of the tile at [row, column], then, with every next(), those
  // of the next one along k. What lies outside of the matrix becomes zero.
  template <bool Even>
  struct Source {
    static constexpr int kPass = kThreads / kChunks, kCount = kRows / kPass;
    static_assert(kPass % 8 == 0);  // so they are all swizzled alike
    const bf16* from;
    int64_t below, along;
    int rows_left, columns_left;
    uint32_t to;

    __device__ void begin(const bf16* matrix, int rows, int columns, int row, int column) {
      int y = threadIdx.x / kChunks, x = threadIdx.x % kChunks;
      from = matrix + int64_t(row + y) * columns + column + x * 8;
      below = int64_t(kPass) * columns;
      along = KRows ? kTileK : int64_t(kTileK) * columns;
      rows_left = rows - row - y;
      columns_left = columns - column - x * 8;
      to = chunk(y, x);
    }
    __device__ void copy(uint32_t tile, int i) const {
      bool inside = i * kPass < rows_left && columns_left > 0;
      int count = Even ? 8 : min(columns_left, 8);
      copy_chunk<Even>(tile + to + i * kPass * kRowBytes, from + below * i, inside ? count : 0);
    }
    __device__ void next() {
      from += along;
      (KRows ? columns_left : rows_left) -= kTileK;
    }
  };

  // Where this lane finds its row of the first fragment of a warp's part, which begins at `outer`.
  // A fragment is four 8 x 8 matrices in the order in which mma wants them: for a [outer, k],
  // [outer + 8, k], [outer, k + 8], [outer + 8, k + 8]; for b (KFirst) the second and the third
  // change places, since an mma wants both its values of b in neighbouring registers.
  template <bool KFirst>
  __device__ static uint32_t first_fragment(int outer) {
    int lane = threadIdx.x % 32, slow = lane / 16, fast = lane / 8 % 2;
    outer += (KFirst ? slow : fast) * 8;
    int k = (KFirst ? fast : slow) * 8;
    return KRows ? chunk(outer + lane % 8, k / 8) : chunk(k + lane % 8, outer / 8);
  }
  // The i-th fragment along the outer dimension, the depth-th along k. Along a tile's rows that is
  // two chunks further, times i or depth, which with swizzling means "exclusive or".
  __device__ static void load(uint32_t (&f)[4], uint32_t first, int i, int depth) {
    if constexpr (KRows)
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3])
                   : "r"((first ^ uint32_t(depth * 32)) + i * 16 * kRowBytes)
                   : "memory");
    else
      asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                   : "=r"(f[0]), "=r"(f[1]), "=r"(f[2]), "=r"(f[3])
                   : "r"((first ^ uint32_t(i * 32)) + depth * 16 * kRowBytes)
                   : "memory");
  }
};

// sum [16, 8] += a [16, 16] b [16, 8]
__device__ void mma(float (&sum)[4], const uint32_t (&a)[4], uint32_t b0, uint32_t b1) {
  asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7},"
      " {%8, %9}, {%0, %1, %2, %3};"
      : "+f"(sum[0]), "+f"(sum[1]), "+f"(sum[2]), "+f"(sum[3])
      : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// Stores a warp's sums, of which `rows` and `columns` exist in c. Of two products beside each
// other, a thread has two neighbours in two rows each. It gives one pair to the thread beside it
// and gets another: with four neighbours each, the threads fill whole sectors of 32 bytes. Plain:
// all exist, four neighbours are aligned, and beta is 0.
template <bool Plain, class Out>
__device__ void store_sums(Out* c, int rows, int columns, int stride,
                           const float (&sum)[kSteps][2 * kSteps][4], float beta, bool aligned) {
  const int lane = threadIdx.x % 32, odd = lane % 2;
  const bool adds = !Plain && beta != 0;
#pragma unroll
  for (int i = 0; i < kSteps * kSteps * 2; ++i) {
    const int down = i / kSteps / 2, right = i / 2 % kSteps, below = i % 2;
    float four[4];
#pragma unroll
    for (int k = 0; k < 2; ++k) {
      float l = sum[down][2 * right][2 * below + k], r = sum[down][2 * right + 1][2 * below + k];
      float got = __shfl_xor_sync(0xffffffffu, odd ? l : r, 1);
      four[k] = odd ? got : l, four[2 + k] = odd ? r : got;
    }
    int y = 16 * down + 8 * below + lane / 4, x = 16 * right + 8 * odd + lane % 4 / 2 * 4;
    if (!Plain && (y >= rows || x >= columns)) continue;
    Out* to = c + int64_t(y) * stride + x;
    cuda::Pack<Out, 4> pack;
    if (adds) pack = aligned ? cuda::load<true, 4>(to, 4) : cuda::load<false, 4>(to, columns - x);
#pragma unroll
    for (int k = 0; k < 4; ++k)
      pack.at[k] = cuda::rounded<Out>(four[k] + (adds ? beta * float(pack.at[k]) : 0));
    Plain || aligned ? cuda::store<true>(to, 4, pack) : cuda::store<false>(to, columns - x, pack);
  }
}

template <int Stages, bool TA, bool TB, class Out, bool Even>
__global__ void __launch_bounds__(kThreads, 1)
    mma_kernel(const bf16* a, const bf16* b, Out* c, int m, int n, int k, float beta,
               TileOrder order) {
  using TileA = Tile<kTileM, !TA>;
  using TileB = Tile<kTileN, TB>;
  using SourceA = typename TileA::template Source<Even>;
  using SourceB = typename TileB::template Source<Even>;
  static_assert(TileA::kBytes + TileB::kBytes == kStageBytes);
  extern __shared__ __align__(128) char memory[];
  const uint32_t ring = uint32_t(__cvta_generic_to_shared(memory));
  const uint32_t ring_end = ring + Stages * kStageBytes;
  const int warp = threadIdx.x / 32, warp_row = warp % (kTileM / kWarpTile) * kWarpTile;
  const int warp_column = warp / (kTileM / kWarpTile) * kWarpTile;
  const uint32_t first_a = TileA::template first_fragment<false>(warp_row);
  const uint32_t first_b = TileB::template first_fragment<true>(warp_column) + TileA::kBytes;

  const int steps = max(1, (k + kTileK - 1) / kTileK);
  int copied = blockIdx.x, to_copy;  // a tile, some steps ahead of the one that is multiplied
  SourceA source_a;
  SourceB source_b;
  auto begin_to_copy = [&] {
    int row, column;
    order.find(copied, &row, &column);
    row *= kTileM, column *= kTileN, to_copy = steps;
    source_a.begin(a, TA ? k : m, TA ? m : k, TA ? 0 : row, TA ? row : 0);
    source_b.begin(b, TB ? n : k, TB ? k : n, TB ? column : 0, TB ? 0 : column);
  };
  begin_to_copy();
  uint32_t filled = ring, used = ring;  // the stages that are copied to and multiplied now
  auto advance = [&](uint32_t& stage) {
    stage += kStageBytes;
    if (stage == ring_end) stage = ring;
  };
  constexpr int copies = SourceA::kCount + SourceB::kCount, groups = kDepths - 1;
  static_assert(copies % groups == 0);
  auto copy = [&](int first, int last) {
#pragma unroll
    for (int i = first; i < last; ++i)
      if (i < SourceA::kCount)
        source_a.copy(filled, i);
      else
        source_b.copy(filled + TileA::kBytes, i - SourceA::kCount);
  };
  auto end_of_copies = [&] {
    asm volatile("cp.async.commit_group;" ::: "memory");
    source_a.next(), source_b.next();
    advance(filled);
    if (--to_copy == 0 && (copied += gridDim.x) < order.count()) begin_to_copy();
  };
  auto wait_for_stage = [] {  // the next is there for all, and all have read the one before
    asm volatile("cp.async.wait_group %0;" ::"n"(Stages - 2) : "memory");
    __syncthreads();
  };

  // Two sets of fragments: one is loaded while the other is multiplied.
  uint32_t fa[2][kSteps][4], fb[2][kSteps][4];
  auto load = [&](int set, int i, int depth) {
    TileA::load(fa[set][i], used + first_a, i, depth);
    TileB::load(fb[set][i], used + first_b, i, depth);
  };

  for (int i = 0; i < Stages - 1; ++i) copy(0, copies), end_of_copies();
  wait_for_stage();
#pragma unroll
  for (int i = 0; i < kSteps; ++i) load(0, i, 0);
  const bool aligned =
      Even && n % 4 == 0 && reinterpret_cast<uintptr_t>(c) % (4 * sizeof(Out)) == 0;
  for (int tile = blockIdx.x; tile < order.count(); tile += gridDim.x) {
    float sum[kSteps][2 * kSteps][4] = {};
    for (int left = steps; left > 0; --left) {
#pragma unroll
      for (int depth = 0; depth < kDepths; ++depth) {
        const int now = depth % 2, next = (depth + 1) % kDepths, group = copies / groups;
        if (depth == groups) wait_for_stage(), advance(used);
#pragma unroll
        for (int i = 0; i < kSteps; ++i) {
          const bool last = i == kSteps - 1;
          if (i < kSteps / 2) load(1 - now, 2 * i, next), load(1 - now, 2 * i + 1, next);
          if (last && depth < groups) copy(depth * group, (depth + 1) * group);
          if (last && depth == groups - 1) end_of_copies();
#pragma unroll
          for (int step = 0; step < 2 * kSteps; ++step) {
            int j = i % 2 ? 2 * kSteps - 1 - step : step;  // and back: the last b is used again
            mma(sum[i][j], fa[now][i], fb[now][j / 2][j % 2 * 2], fb[now][j / 2][j % 2 * 2 + 1]);
          }
        }
      }
    }

    int row, column;
    order.find(tile, &row, &column);
    row *= kTileM, column *= kTileN;
    const bool inside = m - row >= kTileM && n - column >= kTileN;
    row += warp_row, column += warp_column;
    Out* to = c + int64_t(row) * n + column;
    if (aligned && inside && beta == 0)
      store_sums<true>(to, m - row, n - column, n, sum, beta, aligned);
    else
      store_sums<false>(to, m - row, n - column, n, sum, beta, aligned);
  }
}

template <int Stages>
void launch_with(const Matmul& p, cudaStream_t stream) {
  if (p.m * p.n == 0) return;
  auto even = [](const void* matrix, int64_t columns) {
    return reinterpret_cast<uintptr_t>(matrix) % 16 == 0 && columns % 8 == 0;
  };
  TileOrder order{int(tiles(p.m, kTileM)), int(tiles(p.n, kTileN)), kGroup};
  bool all_even = even(p.a, p.ta == Op::T ? p.m : p.k) && even(p.b, p.tb == Op::T ? p.k : p.n);
  constexpr int shared = Stages * kStageBytes;
  const int blocks = std::min(order.count(), multiprocessors());
  cuda::branch(p.ta == Op::T, [&](auto ta) {
    cuda::branch(p.tb == Op::T, [&](auto tb) {
      cuda::branch(all_even, [&](auto is_even) {
        cuda::for_type(p.out, [&](auto out) {
          using Out = decltype(out);
          auto kernel = mma_kernel<Stages, ta(), tb(), Out, is_even()>;
          check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared));
          kernel<<<unsigned(blocks), kThreads, shared, stream>>>(
              static_cast<const bf16*>(p.a), static_cast<const bf16*>(p.b), static_cast<Out*>(p.c),
              int(p.m), int(p.n), int(p.k), p.beta, order);
          check(cudaGetLastError());
        });
      });
    });
  });
}

void launch(const Matmul& p, int stages, cudaStream_t stream) {
  int device = 0, room = 0;
  check(cudaGetDevice(&device));
  check(cudaDeviceGetAttribute(&room, cudaDevAttrMaxSharedMemoryPerBlockOptin, device));
  stages > 2 && room >= 3 * kStageBytes ? launch_with<3>(p, stream) : launch_with<2>(p, stream);
}

}  // namespace

MatmulRung mma_sync(int stages) {
  return {"mma.sync + cp.async", "a ring of asynchronous copies, fragments by ldmatrix",
          [](const Matmul& p) { return p.in == DType::BF16 && p.fits_int(); },
          [stages](const Matmul& p, cudaStream_t stream) { launch(p, stages, stream); }};
}

}  // namespace lockstep::ladder
