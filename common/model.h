#pragma once
// One Llama-style model: Touvron et al., "Llama 2" (2023), section 2.2, with Hugging Face's names.
//
//   tokens ─▶ embedding ─▶ block × L ─▶ norm ─▶ head ─▶ loss
//   block:  x ─┬─ norm ─ q|k|v ─ rope ─ attention ─ o ─(+)─┬─ norm ─ gate|up ─ swiglu ─ down ─(+)─▶
//              └───────────────────────────────────────────┘└────────────────────────────────────┘
//
// A Stage is a run of consecutive pieces: the whole model here, a part of it in a pipeline.

#include <memory>

#include "common/parts.h"

namespace lockstep {

// Which pieces a stage holds.
struct StageSpan {
  int64_t first_layer = 0, layers = 0;
  bool embedding = true, head = true;
  bool ends_apart = false;  // embedding and head are on different ranks (Axis::Ends)
};

class Block : public Module {
 public:
  Block(const ModelConfig&, const Parts&, int64_t layer);
  // x [T, H] -> [T, H]
  Var forward(Tape&, const Var& x, const MicroBatch&, const Tensor& inv_freq);
  Unit& unit() { return unit_; }

 private:
  Var drop(Tape&, const Var& x, const MicroBatch&, const char* where) const;

  const ModelConfig& config_;
  const Parts& parts_;
  std::string prefix_;
  Parameter *input_norm_, *post_norm_;
  Projection qkv_, out_;
  std::unique_ptr<FeedForward> feed_forward_;
  int64_t heads_, kv_heads_;  // this rank's
  Unit unit_;
};

class Embedding : public Module {
 public:
  Embedding(const ModelConfig&, const Parts&, const StageSpan&);
  Parameter& table() { return *table_; }
  Unit& unit() { return unit_; }

 private:
  Parameter* table_;
  Unit unit_;
};

class Head : public Module {
 public:
  Head(const ModelConfig&, const Parts&, const StageSpan&, Parameter* tied_table);
  Parameter& norm() { return *norm_; }
  Parameter& weight() { return *weight_; }
  Unit& unit() { return unit_; }

 private:
  Parameter *norm_, *weight_;
  Unit unit_;
};

class Stage {
 public:
  Stage(const ModelConfig&, const Parts&, DType compute, Device);  // the whole model
  // A part of it. tied_table: the embedding's, if another stage of this rank has it.
  Stage(const ModelConfig&, const Parts&, DType compute, Device, StageSpan,
        Parameter* tied_table = nullptr);
  Parameter* table() { return embedding_ ? &embedding_->table() : nullptr; }
  Stage(const Stage&) = delete;  // its blocks keep references into it

  // [T, H] after this stage's blocks. x is ignored by a stage that holds the embedding.
  Var forward(Tape&, const MicroBatch&, const Var& x = {});
  // [1]: the negative log-likelihood of the valid targets, summed, times scale [1].
  Var loss(Tape&, const Var& hidden, const MicroBatch&, const Tensor& scale);
  // [T, V of this rank]; T are all rows, wherever the stream's rows are.
  Var logits(Tape&, const Var& hidden);

  const ModelConfig& config() const { return config_; }
  DType compute() const { return compute_; }
  Device device() const { return device_; }
  const std::vector<Unit*>& units() const { return units_; }
  Weights parameters() const;  // each once, in the order of first use

 private:
  ModelConfig config_;
  Parts parts_;
  DType compute_;
  Device device_;
  Tensor inv_freq_;
  std::unique_ptr<Embedding> embedding_;
  std::vector<std::unique_ptr<Block>> blocks_;
  std::unique_ptr<Head> head_;
  std::vector<Unit*> units_;
};

}  // namespace lockstep
