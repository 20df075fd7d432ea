#include "common/reduce.h"

#include <algorithm>

namespace lockstep {

template <class T>
struct Accumulator {
  using type = T;
};
template <>
struct Accumulator<bf16> {
  using type = float;
};
template <>
struct Accumulator<fp16> {
  using type = float;
};

template <class T>
static void reduce(std::byte* to, std::span<const std::byte* const> parts, int64_t count,
                   ReduceOp op) {
  using Sum = typename Accumulator<T>::type;
  if (parts.size() == 2 && op == ReduceOp::Sum) {  // a step of a ring: straight to its place
    const T* a = reinterpret_cast<const T*>(parts[0]);
    const T* b = reinterpret_cast<const T*>(parts[1]);
    T* out = reinterpret_cast<T*>(to);
    for (int64_t i = 0; i < count; ++i) out[i] = T(Sum(Sum(a[i]) + Sum(b[i])));
    return;
  }
  constexpr int64_t kBlock = 1024;  // sums of a block stay in the first cache
  Sum sums[kBlock];
  for (int64_t first = 0; first < count; first += kBlock) {
    int64_t n = std::min(kBlock, count - first);
    for (size_t r = 0; r < parts.size(); ++r) {
      const T* part = reinterpret_cast<const T*>(parts[r]) + first;
      if (r == 0) {
        for (int64_t i = 0; i < n; ++i) sums[i] = Sum(part[i]);
      } else if (op == ReduceOp::Sum) {
        for (int64_t i = 0; i < n; ++i) sums[i] = Sum(sums[i] + Sum(part[i]));
      } else {
        for (int64_t i = 0; i < n; ++i) sums[i] = std::max(sums[i], Sum(part[i]));
      }
    }
    T* out = reinterpret_cast<T*>(to) + first;
    for (int64_t i = 0; i < n; ++i) out[i] = T(sums[i]);
  }
}

void reduce_in_rank_order(std::byte* to, std::span<const std::byte* const> parts, int64_t count,
                          DType t, ReduceOp op) {
  switch (t) {
    case DType::F64: return reduce<double>(to, parts, count, op);
    case DType::F32: return reduce<float>(to, parts, count, op);
    case DType::BF16: return reduce<bf16>(to, parts, count, op);
    case DType::F16: return reduce<fp16>(to, parts, count, op);
    case DType::I64: return reduce<int64_t>(to, parts, count, op);
    case DType::I32: return reduce<int32_t>(to, parts, count, op);
    case DType::U16: return reduce<uint16_t>(to, parts, count, op);
    case DType::U8: return reduce<uint8_t>(to, parts, count, op);
  }
  fail("unknown element type");
}

void reduce_in_rank_order(const Tensor& to, const std::vector<Tensor>& parts, ReduceOp op) {
  std::vector<const std::byte*> data;
  for (const Tensor& t : parts) data.push_back(t.raw());
  if (to.device() == Device::CUDA) return cuda::reduce_in_rank_order(to, data, op);
  reduce_in_rank_order(to.raw(), data, to.size(), to.dtype(), op);
}

}  // namespace lockstep
