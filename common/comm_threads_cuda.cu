// The sum of ranks that are threads of one process and share a GPU: one kernel reads all their
// copies and adds element by element, in the order of ranks, with the same roundings as reduce.cpp;
// the result has the same bits.

#include <cuda_fp16.h>

#include "common/kernels_cuda.h"
#include "common/reduce.h"

namespace lockstep::cuda {

// Passed by value, so that no table of pointers must travel first.
constexpr size_t kMostRanks = 64;
struct Parts {
  const void* at[kMostRanks];
  int count;
};

// 16-bit types are added in fp32.
template <class T>
__device__ T widened(T x) {
  return x;
}
__device__ inline float widened(bf16 x) { return x; }
__device__ inline float widened(__half x) { return __half2float(x); }

template <class T, class Sum>
__device__ T narrowed(Sum sum) {
  if constexpr (std::is_same_v<T, bf16>) {
    return rounded<bf16>(sum);
  } else if constexpr (std::is_same_v<T, __half>) {
    return __float2half_rn(sum);
  } else {
    return sum;
  }
}

template <ReduceOp op, class Sum>
__device__ Sum combined(Sum a, Sum b) {
  if constexpr (op == ReduceOp::Sum) {
    return Sum(a + b);
  } else {
    return a < b ? b : a;
  }
}

template <class T, ReduceOp op, bool Even>
__global__ void reduce_kernel(T* to, const __grid_constant__ Parts parts, int64_t n) {
  constexpr int N = kPack<T>;
  int64_t i = flat_index() * N;
  if (i >= n) return;
  decltype(widened(T{})) sums[N];
  for (int r = 0; r < parts.count; ++r) {
    Pack<T, N> pack = load<Even, N>(static_cast<const T*>(parts.at[r]) + i, n - i);
    for (int k = 0; k < N; ++k)
      sums[k] = r == 0 ? widened(pack.at[k]) : combined<op>(sums[k], widened(pack.at[k]));
  }
  Pack<T, N> result;
  for (int k = 0; k < N; ++k) result.at[k] = narrowed<T>(sums[k]);
  store<Even>(to + i, n - i, result);
}

template <class T>
static void reduce(const Tensor& to, const Parts& parts, ReduceOp op) {
  int64_t n = to.size();
  bool even = is_even(kPack<T>, n, to);
  for (int r = 0; r < parts.count; ++r)
    even = even && reinterpret_cast<uintptr_t>(parts.at[r]) % 16 == 0;
  branch(even, [&](auto e) {
    auto kernel = op == ReduceOp::Sum ? reduce_kernel<T, ReduceOp::Sum, e()>
                                      : reduce_kernel<T, ReduceOp::Max, e()>;
    launch(kernel, flat_grid(n, kPack<T>), as<T>(to), parts, n);
  });
}

void reduce_in_rank_order(const Tensor& to, std::span<const std::byte* const> parts, ReduceOp op) {
  require(!parts.empty() && parts.size() <= kMostRanks, "a sum over ", parts.size(),
          " ranks on one GPU; 1 to ", kMostRanks, " are possible");
  expect("the sum", to, to.size(), to.dtype());
  Parts all{};
  for (const std::byte* part : parts) all.at[all.count++] = part;
  switch (to.dtype()) {
    case DType::F64: return reduce<double>(to, all, op);
    case DType::F32: return reduce<float>(to, all, op);
    case DType::BF16: return reduce<bf16>(to, all, op);
    case DType::F16: return reduce<__half>(to, all, op);
    case DType::I64: return reduce<int64_t>(to, all, op);
    case DType::I32: return reduce<int32_t>(to, all, op);
    case DType::U16: return reduce<uint16_t>(to, all, op);
    case DType::U8: return reduce<uint8_t>(to, all, op);
  }
  fail("unknown element type");
}

}  // namespace lockstep::cuda
