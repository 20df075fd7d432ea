#pragma once
// The layouts of tensor parallelism, as a table of choices, and how one of them is compared with
// one rank.

#include "01_single_gpu/recompute.h"
#include "tests/layout.h"

namespace lockstep {

// In which way ranks share a matrix.
struct Variant {
  const char* name;
  TensorParallel how;
};
inline constexpr Variant kVariants[] = {
    {"plain", {}},
    {"sequence", {.sequence_parallel = true}},
    {"gather_again", {.sequence_parallel = true, .gather_again = true}},
    {"overlap", {.sequence_parallel = true, .overlap = 5}}};
inline constexpr int kTP[] = {1, 2, 4, 8}, kDP[] = {1, 2};
inline constexpr Sync kTensorSyncs[] = {Sync::Bucketed, Sync::Zero1, Sync::Zero3};

// Attention of eight heads: a key/value head for each, or two of them.
struct TensorModel {
  int64_t kv_heads = 8;
  bool tied = false, biases = false, dropout = false;

  ModelConfig config() const {
    ModelConfig c = small_config();
    c.heads = 8, c.kv_heads = kv_heads;
    c.ffn = 27, c.vocab = 21;  // over 2, 4 or 8 ranks, some have one column more
    c.tied = tied;
    c.attention_bias = c.mlp_bias = biases;
    c.dropout = dropout ? 0.2 : 0;
    return c;
  }
  std::string name() const {
    return text("kv", kv_heads, tied ? "_tied" : "", biases ? "_biases" : "",
                dropout ? "_dropout" : "");
  }
};

// All choices of it, by number.
inline constexpr size_t kModels = 16;
inline TensorModel model_number(size_t i) {
  return {i & 1 ? 2 : 8, (i & 2) != 0, (i & 4) != 0, (i & 8) != 0};
}

// AdamW divides a gradient by its own size. Where that is near zero, its steps are made of
// rounding, which differs between layouts, and the weights of two right runs part. With an epsilon
// above the rounding and below most gradients, a run's weights can be compared to the last digits.
inline constexpr float kEpsilon = 1e-3f;

struct TensorCase {
  int tp, dp;
  Variant variant;
  Sync sync;
  TensorModel model;

  std::string name() const {
    return text("TP", tp, "_DP", dp, "_", variant.name, "_", name_of(sync), "_", model.name());
  }
  MeshShape shape() const { return {.dp = dp, .tp = tp}; }
};

inline LayoutRig::Settings settings_of(const TensorCase& c) {
  LayoutRig::Settings s;
  s.config = c.model.config();
  s.sync = c.sync;
  s.parallel.bucket_bytes = 3000;
  s.rule.epsilon = kEpsilon;
  s.length = 8;  // rows that all ranks can share
  s.tensor_parallel = c.variant.how;
  return s;
}

// One rank, with nothing exchanged in its model.
inline Trained one_rank(const TensorModel& model, int steps) {
  LayoutRig::Settings s = settings_of({1, 1, kVariants[0], Sync::Naive, model});
  s.tensor_parallel.reset();
  return train(1, s, 1, steps);
}

// First weights are the same bits: an element is drawn by its place in the whole parameter.
// Gradients are sums in another order, and so are steps: kEpsilon sees to that.
inline void expect_one_rank(const TensorCase& c, const Trained& one, int steps) {
  SCOPED_TRACE(c.name());
  Trained many = train(c.shape(), settings_of(c), 2, steps,
                       {.time_limit = 20, .check_calls = true, .check_buffers = true});
  expect_bitwise(many.start, one.start);
  expect_same(many, one, {.loss = 1e-6, .gradient = 1e-5, .weight = 1e-5});
  EXPECT_EQ(strict_order(many.ledgers), "");
}

}  // namespace lockstep
