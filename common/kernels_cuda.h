#pragma once
// What the CUDA kernels share.
//
// Most kernels of a training step do little arithmetic: their time is that of moving their tensors
// through memory once. Memory is fast when each thread asks for 16 bytes at once and the threads of
// a warp ask for neighbouring ones, so a thread works on a *pack* of N neighbouring elements. Each
// kernel exists twice: Even, where all packs are whole and aligned, and not Even, which moves the
// same packs element by element, for odd widths and views that begin anywhere. The same thread gets
// the same elements in both, so the order of a sum depends on sizes alone.
//
// Arithmetic is fp32 in registers; bf16 exists only in memory. No kernel adds with floating-point
// atomics, whose order changes from run to run: sums go through block_sum() and, where one block is
// not enough, through a buffer of partial sums and a second kernel.

#include <cublas_v2.h>
#include <cuda_bf16.h>

#include <algorithm>
#include <cfloat>
#include <cstdint>
#include <cstring>
#include <type_traits>

#include "common/device_cuda.h"
#include "common/kernels.h"

namespace lockstep {

inline void check(cublasStatus_t status, Here here = {}) {
  if (status != CUBLAS_STATUS_SUCCESS)
    throw Error(text("cuBLAS: ", cublasGetStatusString(status)), here.where);
}

namespace cuda {

// ---- On the host: choosing and launching a kernel ----

// Calls f with a value of the C++ type that t names: for_type(t, [&](auto zero) { ... }).
template <class F>
void for_type(DType t, F&& f) {
  if (t == DType::F32) return f(float{});
  if (t == DType::BF16) return f(bf16{});
  fail(text("CUDA kernels compute in BF16 or F32, not in ", name_of(t), ": use --device cpu"));
}

// Turns a condition into a template argument: branch(even, [&](auto e) { kernel<T, e()> ... }).
template <class F>
void branch(bool condition, F&& f) {
  condition ? f(std::true_type{}) : f(std::false_type{});
}

// Elements in 16 bytes of the largest of these types.
template <class... T>
inline constexpr int kPack = 16 / int(std::max({sizeof(T)...}));

// Is every row of `width` elements made of whole packs of N that may be moved in one access? An
// undefined tensor does not matter.
template <class... Tensors>
bool is_even(int N, int64_t width, const Tensors&... t) {
  auto aligned = [&](const Tensor& x) {
    return reinterpret_cast<uintptr_t>(x.raw()) % (size_t(N) * size_of(x.dtype())) == 0;
  };
  return width % N == 0 && (aligned(t) && ...);
}

inline void expect(const char* name, const Tensor& t, int64_t size, DType type, Here here = {}) {
  if (!t.defined()) fail(text(name, " has no memory"), here);
  if (t.device() != Device::CUDA) fail(text(name, " is not in the memory of the GPU"), here);
  if (t.size() != size || t.dtype() != type)
    fail(text(name, " must hold ", size, " elements of ", name_of(type), ", not ", t.size(), " of ",
              name_of(t.dtype())),
         here);
}
template <class T>
T* as(const Tensor& t) {  // without a check, for memory that expect() has seen; null if undefined
  return reinterpret_cast<T*>(t.raw());
}

struct Grid {
  int64_t x, y;
  int threads;
};
inline constexpr int64_t kMostGridRows = 65535;  // grid.y; x: INT32_MAX
inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }
inline int round_to_warps(int64_t threads) {
  return int(std::max<int64_t>(1, ceil_div(threads, 32)) * 32);
}

// One thread for each pack of n elements; see flat_index().
inline Grid flat_grid(int64_t n, int N) { return {ceil_div(ceil_div(n, N), 256), 1, 256}; }
// One thread for each pack of each row: row blockIdx.x, see column(). No thread divides to find its
// place, which for 64-bit numbers would take longer than the work itself.
inline Grid row_grid(int64_t rows, int64_t width, int N) {
  int64_t packs = ceil_div(width, N);
  int threads = round_to_warps(std::min<int64_t>(packs, 256));
  return {rows, ceil_div(packs, threads), threads};
}

template <class... P, class... A>
void launch(void (*kernel)(P...), const Grid& grid, const A&... args) {
  if (grid.x == 0 || grid.y == 0) return;  // nothing to do; CUDA refuses an empty grid
  require(grid.x <= INT32_MAX && grid.y <= kMostGridRows, "a kernel on ", grid.x, " x ", grid.y,
          " blocks; at most ", INT32_MAX, " x ", kMostGridRows, " can be launched");
  kernel<<<dim3(unsigned(grid.x), unsigned(grid.y)), unsigned(grid.threads), 0, device::stream()>>>(
      args...);
  check(cudaGetLastError());
}

// cuBLAS for this rank: bound to its stream, with work space of its own, because cuBLAS promises
// equal bits from run to run only then, and because work space that it took itself could not be
// captured into a graph. Thread-local like the stream. Made on first use, which must not be inside
// a capture.
struct Blas {
  static constexpr size_t kWorkspace = size_t(32) << 20;  // what NVIDIA recommends for Hopper
  cublasHandle_t handle = nullptr;
  void* workspace = nullptr;
};
Blas& blas();

inline cublasOperation_t blas_op(Op op) { return op == Op::N ? CUBLAS_OP_N : CUBLAS_OP_T; }
inline cudaDataType_t blas_type(DType t) { return t == DType::BF16 ? CUDA_R_16BF : CUDA_R_32F; }

// ---- On the device ----

template <class T, int N>
struct alignas(sizeof(T) * N) Pack {
  static_assert(sizeof(T) * N == 16 || sizeof(T) * N == 8);
  T at[N];
};

// What moves a pack in one instruction.
template <class P>
using Whole = std::conditional_t<sizeof(P) == 16, uint4, uint2>;

// PTX, because the compiler takes a uint4 apart and does not always find the pieces again.
__device__ inline void store_whole(uint4* to, uint4 w) {
  asm volatile("st.global.v4.u32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
               "r"(w.x), "r"(w.y), "r"(w.z), "r"(w.w)
               : "memory");
}
__device__ inline void store_whole(uint2* to, uint2 w) {
  asm volatile("st.global.v2.u32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "r"(w.x),
               "r"(w.y)
               : "memory");
}

// The pack that begins at `from`, of which `left` elements lie inside the row.
template <bool Even, int N, class T>
__device__ Pack<T, N> load(const T* from, int64_t left) {
  Pack<T, N> pack{};
  if constexpr (Even) {
    auto whole = *reinterpret_cast<const Whole<Pack<T, N>>*>(from);
    memcpy(&pack, &whole, sizeof(pack));
  } else {
    for (int k = 0; k < N; ++k)
      if (k < left) pack.at[k] = from[k];
  }
  return pack;
}
template <bool Even, int N, class T>
__device__ void store(T* to, int64_t left, const Pack<T, N>& pack) {
  if constexpr (Even) {
    Whole<Pack<T, N>> whole;
    memcpy(&whole, &pack, sizeof(pack));
    store_whole(reinterpret_cast<Whole<Pack<T, N>>*>(to), whole);
  } else {
    for (int k = 0; k < N; ++k)
      if (k < left) to[k] = pack.at[k];
  }
}

// To the type in memory, with the instruction that the GPU has for it; bf16's constructor gives the
// same bits in several steps.
template <class T>
__device__ T rounded(float value) {
  if constexpr (std::is_same_v<T, bf16>) {
    bf16 result;
    result.bits = __bfloat16_as_ushort(__float2bfloat16_rn(value));
    return result;
  } else {
    return value;
  }
}

__device__ inline int64_t flat_index() { return int64_t(blockIdx.x) * blockDim.x + threadIdx.x; }
template <int N>
__device__ int64_t column() {
  return (int64_t(blockIdx.y) * blockDim.x + threadIdx.x) * N;
}

// Combines one value of each thread of a one-dimensional block of whole warps; every thread gets
// the result. The tree is always the same, so the bits are too.
template <class T, class Combine>
__device__ T block_combine(T value, T neutral, Combine combine) {
  __shared__ T of_warp[32];
  for (int step = 16; step > 0; step /= 2)
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, step));
  if (threadIdx.x % 32 == 0) of_warp[threadIdx.x / 32] = value;
  __syncthreads();
  value = threadIdx.x % 32 < blockDim.x / 32 ? of_warp[threadIdx.x % 32] : neutral;
  for (int step = 16; step > 0; step /= 2)
    value = combine(value, __shfl_xor_sync(0xffffffffu, value, step));
  __syncthreads();  // the next call writes of_warp again
  return value;
}
template <class T>
__device__ T block_sum(T value) {
  return block_combine(value, T(0), [](T a, T b) { return a + b; });
}
__device__ inline float block_max(float value) {
  return block_combine(value, -FLT_MAX, [](float a, float b) { return fmaxf(a, b); });
}

// exp(x) in two instructions, with a relative error of about 1e-7 (1 + |x|). What is below 1e-38
// becomes 0: __expf spends three more instructions on such numbers.
__device__ inline float quick_exp(float x) {
  float result;
  asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(result) : "f"(x * 1.44269504f));
  return result;
}

// log(sum(exp(v))) in one pass over v: when a larger value turns up, the sum so far is rescaled.
// Milakov and Gimelshein, "Online normalizer calculation for softmax" (2018), algorithm 3. It
// starts from the lowest finite number, not from -inf, since (-inf) - (-inf) is NaN.
struct LogSumExp {
  float largest = -FLT_MAX, sum = 0;

  template <int N>
  __device__ void add(const float (&v)[N]) {
    float before = largest;
    for (int k = 0; k < N; ++k) largest = fmaxf(largest, v[k]);
    sum *= quick_exp(before - largest);
    for (int k = 0; k < N; ++k) sum += quick_exp(v[k] - largest);
  }
  __device__ void join_block() {
    float mine = largest;
    largest = block_max(mine);
    sum = block_sum(sum * quick_exp(mine - largest));
  }
  __device__ float value() const { return largest + logf(sum); }
};

// Each file fills in its part of the table.
void add_matmul(Kernels&);
void add_attention(Kernels&);
void add_decode(Kernels&);
void add_norm(Kernels&);
void add_layers(Kernels&);
void add_embedding(Kernels&);
void add_loss(Kernels&);
void add_elementwise(Kernels&);
void add_optimizer(Kernels&);

}  // namespace cuda
}  // namespace lockstep
