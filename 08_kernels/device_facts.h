#pragma once
// What a GPU is made of, in the numbers that decide how a kernel is written:
//
//     GPU ── multiprocessors ── each with fp32 units ("cores"), registers and shared memory
//      ▲            ▲
//     grid of ─── blocks of ─── warps of ─── 32 threads, which run the same instruction
//
// A block lives on one multiprocessor; several fit if their threads, registers and shared memory
// do.

#include <cstdint>
#include <string>

#include "common/check.h"

namespace lockstep {

struct DeviceFacts {
  std::string name;
  int major = 0, minor = 0;  // compute capability
  int multiprocessors = 0, warp = 32;
  int threads_per_block = 0, threads_per_multiprocessor = 0;
  int64_t registers = 0, shared_bytes = 0;  // of a multiprocessor; a register has 4 bytes
  int64_t l2_bytes = 0, memory_bytes = 0;
};

// fp32 units of a multiprocessor: NVIDIA, "CUDA programming guide", the table of arithmetic
// throughput per compute capability. 0 where that is not known.
inline int fp32_units(int major, int minor) {
  if (major == 7) return 64;
  if (major == 8) return minor == 0 ? 64 : 128;
  return major >= 9 ? 128 : 0;
}

inline std::string with_commas(int64_t number) {  // "16,896"
  std::string digits = std::to_string(number), result;
  for (size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) result += ',';
    result += digits[i];
  }
  return result;
}

inline std::string to_text(const DeviceFacts& f) {
  int units = fp32_units(f.major, f.minor);
  std::string cores = units
                          ? text(f.multiprocessors, " multiprocessors x ", units,
                                 " fp32 units = ", with_commas(int64_t(f.multiprocessors) * units))
                          : text(f.multiprocessors, " multiprocessors");
  return text(f.name, ", compute capability ", f.major, ".", f.minor, "\n  ", cores,
              "\n  a warp is ", f.warp, " threads, a block has at most ",
              with_commas(f.threads_per_block), ", a multiprocessor ",
              with_commas(f.threads_per_multiprocessor), "\n  ", with_commas(f.registers),
              " registers and ", f.shared_bytes >> 10, " KiB of shared memory a multiprocessor\n  ",
              f.l2_bytes >> 20, " MiB of L2 cache, ", f.memory_bytes >> 30, " GiB of memory\n");
}

}  // namespace lockstep
