#pragma once
// Byte-pair encoding: a word begins as its bytes, and the pair of neighbours that was merged first
// in training is merged first here, until no pair is left that was ever merged. Sennrich, Haddow,
// Birch, "Neural machine translation of rare words with subword units" (ACL 2016), section 3.2.
//
//   l o w e r     lo w e r     low e r     low er        merges, in order: l+o, lo+w, e+r
//
// The pairs of a word wait in a queue by rank, so that a word of n bytes takes n log n steps and a
// megabyte without a space is no trap.

#include <cstddef>
#include <cstdint>
#include <unordered_map>
#include <vector>

namespace lockstep {

class Merges {
 public:
  // left + right becomes `merged`; smaller ranks go first.
  void add(int32_t left, int32_t right, int32_t rank, int32_t merged) {
    merges_[key(left, right)] = {rank, merged};
  }
  std::vector<int32_t> apply(std::vector<int32_t> tokens) const;

 private:
  struct Merge {
    int32_t rank, merged;
  };
  static uint64_t key(int32_t left, int32_t right) {
    return uint64_t(uint32_t(left)) << 32 | uint32_t(right);
  }
  std::unordered_map<uint64_t, Merge> merges_;
};

}  // namespace lockstep
