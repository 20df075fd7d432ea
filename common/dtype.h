#pragma once
// The element types of tensors. bf16 keeps the 8 exponent bits of fp32 and only 7 of its 23
// mantissa bits: same range, about three decimal digits. Arithmetic happens in fp32; bf16 is for
// storage.

#include <bit>
#include <cstddef>
#include <cstdint>

#include "common/check.h"

#ifdef __CUDACC__
#define LOCKSTEP_BOTH __host__ __device__  // callable from kernels and from host code
#else
#define LOCKSTEP_BOTH
#endif

namespace lockstep {

enum class DType : uint8_t { F64, F32, BF16, F16, I64, I32, U16, U8 };

struct bf16 {
  uint16_t bits = 0;
  bf16() = default;
  LOCKSTEP_BOTH bf16(float value) {  // rounds to nearest, ties to even; NaN stays NaN
    uint32_t b = as_bits(value);
    bool nan = (b & 0x7fffffffu) > 0x7f800000u;
    bits = nan ? 0x7fffu : uint16_t((b + 0x7fffu + ((b >> 16) & 1u)) >> 16);
  }
  LOCKSTEP_BOTH operator float() const { return as_float(uint32_t(bits) << 16); }

 private:
#ifdef __CUDA_ARCH__
  __device__ static uint32_t as_bits(float f) { return __float_as_uint(f); }
  __device__ static float as_float(uint32_t b) { return __uint_as_float(b); }
#else
  static uint32_t as_bits(float f) { return std::bit_cast<uint32_t>(f); }
  static float as_float(uint32_t b) { return std::bit_cast<float>(b); }
#endif
};

// IEEE half precision: 5 exponent and 10 mantissa bits. Only messages carry it so far; conversions
// are done in software, so that every compiler has them.
struct fp16 {
  uint16_t bits = 0;
  fp16() = default;
  fp16(float value);  // rounds to nearest, ties to even; beyond 65504: infinity
  operator float() const;
};

inline size_t size_of(DType t) {
  switch (t) {
    case DType::F64:
    case DType::I64: return 8;
    case DType::F32:
    case DType::I32: return 4;
    case DType::BF16:
    case DType::F16:
    case DType::U16: return 2;
    case DType::U8: return 1;
  }
  fail("unknown element type");
}

inline const char* name_of(DType t) {
  switch (t) {
    case DType::F64: return "F64";
    case DType::F32: return "F32";
    case DType::BF16: return "BF16";
    case DType::F16: return "F16";
    case DType::I64: return "I64";
    case DType::I32: return "I32";
    case DType::U16: return "U16";
    case DType::U8: return "U8";
  }
  fail("unknown element type");
}

template <class T>
inline constexpr DType dtype_of = DType::U8;
template <>
inline constexpr DType dtype_of<double> = DType::F64;
template <>
inline constexpr DType dtype_of<float> = DType::F32;
template <>
inline constexpr DType dtype_of<bf16> = DType::BF16;
template <>
inline constexpr DType dtype_of<fp16> = DType::F16;
template <>
inline constexpr DType dtype_of<int64_t> = DType::I64;
template <>
inline constexpr DType dtype_of<int32_t> = DType::I32;
template <>
inline constexpr DType dtype_of<uint16_t> = DType::U16;

// The type in which sums over elements of type t are kept: fp64 for fp64, fp32 for everything else.
inline DType sum_type(DType t) { return t == DType::F64 ? DType::F64 : DType::F32; }
template <class T>
struct SumOf {
  using type = float;
};
template <>
struct SumOf<double> {
  using type = double;
};

// Calls f with a value of the C++ type that t names: with_type(t, [&](auto zero) { ... }).
template <class F>
auto with_type(DType t, F&& f) {
  switch (t) {
    case DType::F64: return f(double{});
    case DType::F32: return f(float{});
    case DType::BF16: return f(bf16{});
    default: fail(text("a floating-point tensor was expected, this one holds ", name_of(t)));
  }
}

}  // namespace lockstep
