#pragma once
// A weight of the model, wherever its elements are. A module declares a Parameter without memory;
// the data-parallel strategy gives it memory, and may take it away again (ZeRO). Code that runs
// later keeps the Parameter*, never the tensors in it.

#include <cstdint>
#include <functional>
#include <string>

#include "common/kernels.h"
#include "common/tensor.h"

namespace lockstep {

// Groups of ranks that hold copies of the same elements.
enum class Axis : uint8_t {
  Data,        // dp x cp
  ExpertData,  // dp x cp / ep: who shares an expert
  TP,          // norm gains, and everything else that tensor parallelism does not cut
  KvCopies,    // TP ranks that hold the same key/value head
  Ends,        // first and last pipeline stage: the tied embedding
};

struct AxisSet {
  uint8_t bits = 0;
  constexpr AxisSet() = default;
  constexpr AxisSet(std::initializer_list<Axis> axes) {
    for (Axis a : axes) bits |= uint8_t(1u << int(a));
  }
  constexpr AxisSet with(AxisSet other) const {
    AxisSet all;
    all.bits = bits | other.bits;
    return all;
  }
  constexpr AxisSet without(AxisSet other) const {
    AxisSet rest;
    rest.bits = uint8_t(bits & ~other.bits);
    return rest;
  }
  constexpr bool has(Axis a) const { return bits >> int(a) & 1; }
  constexpr bool operator==(const AxisSet&) const = default;
};

struct Cut {
  int rank = 0, size = 1;
};  // which of how many parts is this rank's
struct Range {
  int64_t first = 0, count = 0;
};
// Parts that differ by at most one, the larger ones first.
inline Range share(int64_t n, Cut cut) {
  int64_t each = n / cut.size, larger = n % cut.size;
  int64_t first = cut.rank * each + (cut.rank < larger ? cut.rank : larger);
  return {first, each + (cut.rank < larger ? 1 : 0)};
}

// Of n that are fewer than ranks, neighbours hold copies of one (key/value heads).
inline Range share_or_copy(int64_t n, Cut cut) {
  if (n >= cut.size) return share(n, cut);
  return {cut.rank * n / cut.size, 1};
}

// Where a local tensor sits in the whole parameter: a range [first, first + local[dim]) of one dim.
// All that initialisation, checks and resharding need to know.
struct Shard {
  Shape whole, local;
  int dim = -1;  // -1: not cut
  int64_t first = 0;
  IndexMap index_map() const;
  int64_t whole_index(int64_t local_index) const { return index_map().whole(local_index); }
};

struct Init {
  enum Kind : uint8_t { Normal, Ones, Zeros } kind = Normal;
  double std = 0.02;
};

struct Parameter {
  std::string name;  // Hugging Face's: model.layers.0.self_attn.q_proj.weight
  Shard shard;
  Init init;
  AxisSet replicas;  // axes over which several ranks hold these very elements: count one of them
  AxisSet sum_over;  // subset of replicas: their gradients are partial sums
  Tensor value, grad;

  // need_grad: before the first weight gradient of a tape is added. on_grad_ready: after the last.
  std::function<void(Parameter&)> need_grad, on_grad_ready;

  int64_t size() const { return elements(shard.local); }
  // Matrices decay; gains and biases (one-dimensional) do not.
  bool decays() const { return shard.whole.size() > 1; }
};

}  // namespace lockstep
