#pragma once
// Random numbers as a function: the value depends on (seed, stream, index) and on nothing else, so
// a shard of a tensor holds the same numbers as the whole tensor does at those places, a recomputed
// dropout mask is the same mask, and no generator state has to travel with a checkpoint.
//
// Philox-4x32-10: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3"
// (SC 2011), section 4.3 and table 2. Ten rounds of multiply and swap; passes BigCrush.

#include <cmath>
#include <cstdint>
#include <string_view>

#include "common/dtype.h"

namespace lockstep {

struct Random4 {
  uint32_t x[4];
};

LOCKSTEP_BOTH inline Random4 philox(uint64_t key, uint64_t counter_high, uint64_t counter_low) {
  uint32_t k0 = uint32_t(key), k1 = uint32_t(key >> 32);
  uint32_t c0 = uint32_t(counter_low), c1 = uint32_t(counter_low >> 32);
  uint32_t c2 = uint32_t(counter_high), c3 = uint32_t(counter_high >> 32);
  for (int round = 0; round < 10; ++round) {
    uint64_t p0 = uint64_t(0xD2511F53u) * c0, p1 = uint64_t(0xCD9E8D57u) * c2;
    c0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
    c2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
    c1 = uint32_t(p1);
    c3 = uint32_t(p0);
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  return {{c0, c1, c2, c3}};
}

// A stream of numbers: the seed of the run and what the numbers are for ("model.norm.weight").
struct RandomStream {
  uint64_t seed = 0, id = 0;
  RandomStream() = default;
  RandomStream(uint64_t seed, std::string_view purpose) : seed(seed), id(0xcbf29ce484222325ull) {
    for (unsigned char c : purpose) id = (id ^ c) * 0x100000001b3ull;  // FNV-1a
  }
  LOCKSTEP_BOTH Random4 at(uint64_t index) const { return philox(seed, id, index); }

  LOCKSTEP_BOTH static float unit(uint32_t x) { return (x >> 8) * 0x1p-24f; }  // [0, 1)
  LOCKSTEP_BOTH float uniform(uint64_t index) const { return unit(at(index).x[0]); }

  // Standard normal (Box and Muller 1958): one counter gives one number; wasteful, but a shard may
  // begin at any index.
  LOCKSTEP_BOTH float normal(uint64_t index) const {
    Random4 r = at(index);
    float radius = sqrtf(-2.0f * logf(1.0f - unit(r.x[0])));  // 1 - u lies in (0, 1]
    return radius * cosf(6.2831853071795865f * unit(r.x[1]));
  }
};

}  // namespace lockstep
