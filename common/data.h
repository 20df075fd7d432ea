#pragma once
// Which tokens a step trains on: one global order for every layout.
//
// The samples of a run are numbered 0, 1, 2, ...; epoch e is the samples e*W .. (e+1)*W-1 over W
// windows of text. Which window a sample is depends on (seed, sample number) alone, so every rank
// can work out any part of the order without asking anyone: ranks take disjoint numbers, a resumed
// run goes on at the next number, and one rank or a hundred see the same samples in a step.

#include <cstdint>
#include <vector>

#include "common/corpus.h"
#include "common/random.h"
#include "common/tensor.h"

namespace lockstep {

// sample number -> window. Each epoch visits every window once, in an order of its own.
class Sampler {
 public:
  Sampler(int64_t windows, uint64_t seed);
  static Sampler in_order(int64_t windows);  // for validation: sample i is window i

  int64_t window(int64_t sample) const;
  int64_t epoch(int64_t sample) const { return sample / windows_; }
  int64_t windows() const { return windows_; }

 private:
  uint64_t scramble(uint64_t x, const RandomStream& order) const;

  int64_t windows_;
  uint64_t seed_;
  bool shuffled_ = true;
  int half_bits_ = 1;  // the network permutes [0, 2^(2 half_bits)), which holds all windows
};

// Tokens on the CPU, sequence after sequence, as the model's layers take them.
struct Batch {
  Tensor inputs, targets;  // [T] I32, T = sequences * length; a target < 0 is ignored
  Tensor positions;        // [T] I32: place in the sequence
  Tensor rows;             // [T] I64: sample * window length + position, for dropout
  int64_t sequences = 0;
  int64_t length = 0;  // rows of each sequence: the window, or the part of it that this rank holds
  int64_t valid = 0;   // targets that are not ignored
};

struct Samples {
  int64_t first = 0, count = 0;
};

// `held` lists the positions of each window that this rank holds, in its order; empty: all. Context
// parallelism gives each of its ranks other ones.
Batch load(const Corpus& corpus, Split split, const Sampler& sampler, Samples samples,
           int64_t length, const std::vector<int32_t>& held = {});

}  // namespace lockstep
