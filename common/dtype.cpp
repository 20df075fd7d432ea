#include "common/dtype.h"

namespace lockstep {

// The 13 mantissa bits that fp16 lacks are rounded away. Below 2^-14 the numbers are evenly spaced,
// 2^-24 apart; adding and taking away a suitable power of two lets fp32's own rounding find them.
fp16::fp16(float value) {
  uint32_t b = std::bit_cast<uint32_t>(value), sign = b >> 16 & 0x8000u,
           magnitude = b & 0x7fffffffu;
  if (magnitude > 0x7f800000u) {
    bits = uint16_t(sign | 0x7e00u);  // NaN
  } else if (magnitude >= 0x477ff000u) {
    bits = uint16_t(sign | 0x7c00u);  // rounds to 65536 or more: infinity
  } else if (magnitude < 0x38800000u) {
    float spaced = std::bit_cast<float>(magnitude) + 0.5f;  // 0.5 has a spacing of 2^-24
    bits = uint16_t(sign | (std::bit_cast<uint32_t>(spaced) - 0x3f000000u));
  } else {
    uint32_t rounded = magnitude + 0xfffu + (magnitude >> 13 & 1u);
    bits = uint16_t(sign | ((rounded - 0x38000000u) >> 13));
  }
}

fp16::operator float() const {
  uint32_t sign = uint32_t(bits & 0x8000u) << 16, exponent = bits >> 10 & 31u,
           mantissa = bits & 0x3ffu;
  if (exponent == 31) return std::bit_cast<float>(sign | 0x7f800000u | mantissa << 13);
  if (exponent == 0) {
    float magnitude = float(mantissa) * 0x1p-24f;
    return sign ? -magnitude : magnitude;
  }
  return std::bit_cast<float>(sign | (exponent + 112u) << 23 | mantissa << 13);
}

}  // namespace lockstep
