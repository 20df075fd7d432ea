#pragma once
// The KV cache: why the next token costs one row of work and not all of them.
//
//   without     token t runs the whole model over t rows            O(t) rows, O(t^2) scores
//   with        its own row alone; of the rows before it, attention    1 row,  O(t) scores
//               needs only their keys and values, which never change
//
// That they never change is what "causal" means: row i sees rows 0 to i, so rows that come later
// leave it alone. Queries are not kept: nobody asks a past row again. The price is memory,
//
//   2 (k and v) x layers x rows x kv_heads x head_dim x bytes per element,
//
// and is why models share key/value heads (GQA): Shazeer, "Fast transformer decoding" (2019),
// sections 2.4 and 3.

#include "common/parts.h"

namespace lockstep {

class KvCache {
 public:
  KvCache(const ModelConfig& c, int64_t longest, DType compute, Device device)
      : layers_(c.layers), longest_(longest), width_(c.kv_size()) {
    memory_ = Tensor::empty({2 * layers_ * longest_, width_}, compute, device, Category::Buffers);
  }
  static int64_t bytes(const ModelConfig& c, int64_t longest, DType compute) {
    return 2 * c.layers * longest * c.kv_size() * int64_t(size_of(compute));
  }

  int64_t length() const { return length_; }  // rows so far: the position of the next one
  int64_t longest() const { return longest_; }
  void clear() { length_ = next_layer_ = 0; }

  // What use_kv_cache() puts in attention's place. A forward pass calls it once per layer, from the
  // first to the last; that is how it knows whose keys these are, and when the rows have passed.
  Var attend(Tape& tape, const Var& in, const AttentionShape& shape) {
    require(!tape.records(), "a KV cache serves generation: what it computes has no gradient");
    require(shape.sequences == 1 && shape.kv_heads * shape.head_dim == width_,
            "a KV cache for one "
            "sequence with keys of ",
            width_, " elements was given ", shape.sequences, " with keys of ",
            shape.kv_heads * shape.head_dim);
    require(length_ + shape.length <= longest_, "the KV cache has room for ", longest_,
            " tokens, and ", length_ + shape.length, " have come");
    Tensor qkv = in.value;
    Tensor out = qkv.like({shape.length, shape.heads * shape.head_dim});
    on(qkv).attention_cached(out, keys(next_layer_), values(next_layer_), qkv, shape, length_);
    if (++next_layer_ == layers_) {
      next_layer_ = 0;
      length_ += shape.length;
    }
    return tape.record("attention", {out}, {in}, {})[0];
  }

 private:
  Tensor keys(int64_t layer) const { return memory_.rows(2 * layer * longest_, longest_); }
  Tensor values(int64_t layer) const { return memory_.rows((2 * layer + 1) * longest_, longest_); }

  int64_t layers_, longest_, width_;
  int64_t length_ = 0, next_layer_ = 0;
  Tensor memory_;  // [layers, k and v, longest, width]
};

// The model that is built from these parts remembers. Its inputs are then the new tokens alone, at
// positions cache.length(), cache.length() + 1, ...
inline void use_kv_cache(Parts& parts, KvCache& cache) {
  parts.attention = [&cache](Tape& tape, const Var& qkv, const AttentionShape& shape) {
    return cache.attend(tape, qkv, shape);
  };
}

}  // namespace lockstep
