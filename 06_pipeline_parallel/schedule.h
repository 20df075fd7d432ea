#pragma once
// A pipeline schedule is data: for each rank, what it does in which order. Nothing runs here; the
// files beside this one produce schedules, validate.h and simulate.h look at them, and pipeline.h
// runs any of them.
//
//     rank 0   F0 F1 F2 F3 B0    B1 …        F: forward       I: backward, gradients of inputs
//     rank 1      F0 F1 F2 B0 F3 …           B: I and W       W: backward, gradients of weights
//
// The layers are cut into stages, stage 0 has the embedding and the last one the head and the loss.
// A rank may hold several stages: its chunks.

#include <cstdint>
#include <vector>

#include "common/check.h"

namespace lockstep {

struct Action {
  enum Kind : uint8_t { F, B, I, W } kind;
  int chunk = 0, micro = 0;
  bool operator==(const Action&) const = default;
};
using Schedule = std::vector<std::vector<Action>>;  // [rank]

// Which rank holds which stage, as its which chunk.
//   Loop   stage = chunk * ranks + rank              0 1 2 3 | 4 5 6 7
//   V      down with chunk 0, up with chunk 1        0 1 2 3 | 7 6 5 4: rank 0 has both ends
struct Placement {
  enum Shape : uint8_t { Loop, V } shape = Loop;
  int ranks = 1, chunks = 1;
  int stages() const { return ranks * chunks; }
  int stage(int rank, int chunk) const {
    bool upwards = shape == V && chunk % 2 == 1;
    return chunk * ranks + (upwards ? ranks - 1 - rank : rank);
  }
  int chunk_of(int stage) const { return stage / ranks; }
  int rank_of(int stage) const {
    bool upwards = shape == V && chunk_of(stage) % 2 == 1;
    return upwards ? ranks - 1 - stage % ranks : stage % ranks;
  }
  bool ends_share_a_rank() const { return rank_of(0) == rank_of(stages() - 1); }
};

}  // namespace lockstep
