#pragma once
// Which gradients lie in one block of memory, in the order in which backward finishes them: from
// the head to the embedding. A bucket is closed when it has reached its size. It is never cut
// inside a group of neighbours (q|k|v, gate|up): one matmul writes their gradients.
//
//   bucket 0   [ lm_head | norm | down 9 | gate 9 up 9 ]
//   bucket 1   [ … ]                        every parameter's gradient is a view: nothing is copied
//
// Gradients in one bucket are summed over the same axes (parameter.h).

#include <map>
#include <utility>

#include "common/model.h"

namespace lockstep {

struct Bucket {
  Stage* stage = nullptr;
  Weights parameters;  // in the order of their memory
  int64_t size = 0;    // elements
};

enum class CutAt : uint8_t { Size, Units };  // Units: also where a block ends, whatever its size

inline std::vector<Bucket> make_buckets(const std::vector<Stage*>& chunks, int64_t elements,
                                        CutAt cut_at = CutAt::Size) {
  std::vector<Bucket> buckets;
  std::map<uint8_t, Bucket> open;  // by the axes of their sum
  auto close = [&](Bucket& bucket) {
    if (!bucket.parameters.empty()) buckets.push_back(std::exchange(bucket, {}));
  };
  for (size_t c = chunks.size(); c-- > 0;) {
    const std::vector<Unit*>& units = chunks[c]->units();
    for (size_t u = units.size(); u-- > 0;) {
      for (size_t g = units[u]->groups.size(); g-- > 0;) {
        const Weights& group = units[u]->groups[g];
        Bucket& bucket = open[group[0]->sum_over.bits];
        bucket.stage = chunks[c];
        for (Parameter* p : group) {
          require(p->sum_over == group[0]->sum_over, p->name, " and ", group[0]->name,
                  " are neighbours and cannot be summed over different axes");
          bucket.parameters.push_back(p);
          bucket.size += p->size();
        }
        if (bucket.size >= elements) close(bucket);
      }
      if (cut_at == CutAt::Units)
        for (auto& [axes, bucket] : open) close(bucket);
    }
    for (auto& [axes, bucket] : open) close(bucket);  // another stage may have another type
  }
  return buckets;
}

// The bucket's memory as its parameters' views of it.
inline void give_out(const Bucket& bucket, const Tensor& memory, Tensor Parameter::*which) {
  int64_t first = 0;
  for (Parameter* p : bucket.parameters) {
    p->*which = memory.flat(first, p->size()).view(p->shard.local);
    first += p->size();
  }
}

}  // namespace lockstep
