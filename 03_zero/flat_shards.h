#pragma once
// ZeRO cuts memory, not tensors: a bucket of parameters is one flat run of numbers, padded to a
// multiple of the ranks, and each rank owns an equal slice of it.
//
//   bucket     [ down 9        | gate 9        | up 9      | pad ]        n = 10, four ranks:
//   rank       0         | 1         | 2         | 3                       shards of 3, the last
//   owned by 1     [ end of down 9 | start of gate 9 ]                     one has 2 of padding
//
// What a rank owns of a parameter may begin anywhere in it. The optimizer, the gradient norm and
// checkpoints see those pieces (Owned); padding is in none of them, so it is never updated, counted
// or saved. Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion parameter
// models" (2020), section 5.

#include <algorithm>
#include <functional>

#include "02_data_parallel/buckets.h"
#include "common/strategy.h"

namespace lockstep {

// n elements in equal shards for `ranks` of them.
struct Sharding {
  int64_t size;
  int ranks;
  int64_t shard() const { return (size + ranks - 1) / ranks; }
  int64_t padded() const { return shard() * ranks; }
  int64_t pad() const { return padded() - size; }
  int64_t pad_of(int rank) const {  // how much of a rank's shard is padding
    return std::clamp<int64_t>((rank + 1) * shard() - size, 0, shard());
  }
};

// The part of each of the bucket's parameters that lies in this rank's shard of it.
inline std::vector<Owned> owned_of(const Bucket& bucket, const Tensor& value_shard,
                                   const Tensor& grad_shard, Cut data,
                                   const std::function<bool(const Parameter&)>& counts) {
  std::vector<Owned> owned;
  int64_t shard = value_shard.size(), begin = data.rank * shard, end = begin + shard, at = 0;
  for (Parameter* p : bucket.parameters) {
    int64_t first = std::max(begin, at), last = std::min(end, at + p->size());
    if (first < last) {
      Tensor value = value_shard.flat(first - begin, last - first);
      Tensor grad = grad_shard.flat(first - begin, last - first);
      owned.push_back({p, first - at, value, master_of(value), grad, counts(*p)});
    }
    at += p->size();
  }
  return owned;
}

}  // namespace lockstep
