#include "common/data.h"

#include <algorithm>
#include <numeric>

namespace lockstep {

Sampler::Sampler(int64_t windows, uint64_t seed) : windows_(windows), seed_(seed) {
  require(windows >= 1 && windows < int64_t(1) << 60, "an order over ", windows,
          " windows was asked for; at least 1 is needed");
  while (int64_t(1) << (2 * half_bits_) < windows) ++half_bits_;
}

Sampler Sampler::in_order(int64_t windows) {
  Sampler sampler(windows, 0);
  sampler.shuffled_ = false;
  return sampler;
}

// A Feistel network: (left, right) -> (right, left ^ f(right)) can be undone whatever f is, so any
// number of rounds of it is a permutation, and no table of the order is needed. Luby and Rackoff,
// "How to construct pseudorandom permutations" (1988): from 4 rounds on it looks random; a few more
// make up for tiny domains.
uint64_t Sampler::scramble(uint64_t x, const RandomStream& order) const {
  constexpr uint64_t kRounds = 8;
  const uint64_t mask = (uint64_t(1) << half_bits_) - 1;
  uint64_t left = x >> half_bits_, right = x & mask;
  for (uint64_t round = 0; round < kRounds; ++round) {
    uint64_t mixed = left ^ (order.at(round << 32 | right).x[0] & mask);
    left = right;
    right = mixed;
  }
  return left << half_bits_ | right;
}

// The network's domain is up to four times as large as ours. Following the permutation from one of
// our numbers until it comes back to one of ours is a permutation of ours ("cycle walking", Black
// and Rogaway, "Ciphers with arbitrary finite domains", 2002).
int64_t Sampler::window(int64_t sample) const {
  require(sample >= 0, "sample ", sample, " was asked for; samples are numbered from 0");
  if (!shuffled_) return sample % windows_;
  const RandomStream order(seed_, text("order of epoch ", epoch(sample)));
  uint64_t x = uint64_t(sample % windows_);
  do x = scramble(x, order);
  while (x >= uint64_t(windows_));
  return int64_t(x);
}

Batch load(const Corpus& corpus, Split split, const Sampler& sampler, Samples samples,
           int64_t length, const std::vector<int32_t>& held) {
  std::vector<int32_t> places = held;
  if (places.empty()) {
    places.resize(size_t(length));
    std::iota(places.begin(), places.end(), 0);
  }
  for (int32_t place : places)
    require(place >= 0 && place < length, "position ", place, " does not exist in a window of ",
            length, " tokens");
  require(sampler.windows() <= corpus.windows(split, length), "the order has ", sampler.windows(),
          " windows, but the text fills only ", corpus.windows(split, length), " of length ",
          length);

  Batch b;
  b.sequences = samples.count;
  b.length = int64_t(places.size());
  b.valid = b.sequences * b.length;
  auto make = [&](DType type) {
    return Tensor::empty({b.valid}, type, Device::CPU, Category::Buffers);
  };
  b.inputs = make(DType::I32), b.targets = make(DType::I32), b.positions = make(DType::I32);
  b.rows = make(DType::I64);
  int64_t t = 0;
  for (int64_t sample = samples.first; sample < samples.first + samples.count; ++sample) {
    const int64_t start = sampler.window(sample) * length;
    for (int32_t place : places) {
      b.inputs.data<int32_t>()[t] = corpus.token(split, start + place);
      b.targets.data<int32_t>()[t] = corpus.token(split, start + place + 1);
      b.positions.data<int32_t>()[t] = place;
      b.rows.data<int64_t>()[t] = sample * length + place;
      ++t;
    }
  }
  return b;
}

}  // namespace lockstep
