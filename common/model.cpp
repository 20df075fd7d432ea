#include "common/model.h"

namespace lockstep {

static Tensor stream_rows(const Parts& parts, const Tensor& rows) {
  Range mine = share(rows.size(), parts.stream_rows);
  return rows.flat(mine.first, mine.count);
}

Block::Block(const ModelConfig& c, const Parts& parts, int64_t layer)
    : config_(c), parts_(parts), prefix_(text("model.layers.", layer, ".")) {
  Range q = share(c.heads, parts.tp), kv = share_or_copy(c.kv_heads, parts.tp);
  auto rows = [&](Range heads) {
    return Range{heads.first * c.head_dim, heads.count * c.head_dim};
  };
  heads_ = q.count;
  kv_heads_ = kv.count;
  std::string attention = prefix_ + "self_attn.";
  input_norm_ = gain(parts, prefix_ + "input_layernorm.weight", c.hidden);
  AxisSet copied = parts.tp.size > c.kv_heads ? AxisSet{Axis::KvCopies} : AxisSet{};
  qkv_ = projection(parts, attention, Along::Columns,
                    {{"q_proj", c.q_size(), c.hidden, rows(q)},
                     {"k_proj", c.kv_size(), c.hidden, rows(kv), copied},
                     {"v_proj", c.kv_size(), c.hidden, rows(kv), copied}},
                    c.attention_bias, c.init_std);
  out_ = projection(parts, attention, Along::Rows, {{"o_proj", c.hidden, c.q_size(), rows(q)}},
                    c.attention_bias, c.residual_std());
  post_norm_ = gain(parts, prefix_ + "post_attention_layernorm.weight", c.hidden);
  feed_forward_ = parts.feed_forward(c, parts, prefix_ + "mlp.");
  unit_ = {Unit::Block, text("layer ", layer), groups(), {}};
  for (const Weights& group : feed_forward_->groups()) unit_.groups.push_back(group);
}

Var Block::drop(Tape& tape, const Var& x, const MicroBatch& batch, const char* where) const {
  if (!batch.training) return x;
  RandomStream stream(parts_.seed, prefix_ + where);
  Tensor rows = stream_rows(parts_, batch.rows);
  return dropout(tape, x, rows, config_.dropout, stream, config_.hidden);
}

Var Block::forward(Tape& tape, const Var& x, const MicroBatch& batch, const Tensor& inv_freq) {
  AttentionShape shape{batch.sequences, batch.length, heads_, kv_heads_, config_.head_dim};
  Var normed = rmsnorm(tape, x, *input_norm_, config_.norm_epsilon);
  Var qkv = rope(tape, parts_.column(tape, normed, qkv_), batch.positions, inv_freq, shape);
  Var attended = parts_.row(tape, parts_.attention(tape, qkv, shape), out_);
  attended = drop(tape, attended, batch, "attention dropout");

  Normed middle = add_rmsnorm(tape, x, attended, *post_norm_, config_.norm_epsilon);
  Var fed = drop(tape, feed_forward_->forward(tape, middle.normed, batch), batch, "mlp dropout");
  return add(tape, middle.sum, fed);
}

// The tied table is the embedding's and the head's; in a pipeline whose ends are different ranks,
// both have a copy.
static AxisSet table_copies(const ModelConfig& c, const StageSpan& span) {
  return c.tied && span.ends_apart ? AxisSet{Axis::Ends} : AxisSet{};
}

Embedding::Embedding(const ModelConfig& c, const Parts& parts, const StageSpan& span) {
  Matrix table{"embed_tokens", c.vocab, c.hidden, share(c.vocab, parts.tp), table_copies(c, span)};
  table_ = projection(parts, "model.", Along::Columns, {table}, false, c.init_std).weights[0];
  unit_ = {Unit::Embedding, "embedding", groups(), {}};
}

Head::Head(const ModelConfig& c, const Parts& parts, const StageSpan& span, Parameter* table) {
  norm_ = gain(parts, "model.norm.weight", c.hidden);
  weight_ = table;
  if (!table) {
    Matrix head{c.tied ? "embed_tokens" : "lm_head", c.vocab, c.hidden, share(c.vocab, parts.tp),
                table_copies(c, span)};
    const char* prefix = c.tied ? "model." : "";
    weight_ = projection(parts, prefix, Along::Columns, {head}, false, c.init_std).weights[0];
  }
  unit_ = {Unit::Head, "head", groups(), {}};
  if (table) unit_.borrowed.push_back(table);
}

Stage::Stage(const ModelConfig& config, const Parts& parts, DType compute, Device device)
    : Stage(config, parts, compute, device, {0, config.layers, true, true}) {}

Stage::Stage(const ModelConfig& config, const Parts& parts, DType compute, Device device,
             StageSpan span, Parameter* table)
    : config_(config), parts_(parts), compute_(compute), device_(device) {
  config_.validate();
  inv_freq_ = rope_frequencies(config.head_dim, config.rope_theta, compute, device);
  if (span.embedding) {
    embedding_ = std::make_unique<Embedding>(config_, parts_, span);
    units_.push_back(&embedding_->unit());
  }
  for (int64_t i = 0; i < span.layers; ++i) {
    blocks_.push_back(std::make_unique<Block>(config_, parts_, span.first_layer + i));
    units_.push_back(&blocks_.back()->unit());
  }
  if (span.head) {
    if (config.tied && embedding_) table = &embedding_->table();
    head_ = std::make_unique<Head>(config_, parts_, span, table);
    units_.push_back(&head_->unit());
  }
}

Var Stage::forward(Tape& tape, const MicroBatch& batch, const Var& x) {
  Var stream = x;
  if (embedding_) {
    Body look_up = [this, batch](Tape& t, const Var&) {
      Var out = parts_.embedding(t, embedding_->table(), batch.inputs);
      if (!batch.training) return out;
      RandomStream mask(parts_.seed, "embedding dropout");
      Tensor rows = stream_rows(parts_, batch.rows);
      return dropout(t, out, rows, config_.dropout, mask, config_.hidden);
    };
    stream = parts_.around(tape, {}, embedding_->unit(), look_up);
  }
  for (auto& block : blocks_) {
    // The body may run again in backward (recomputation), when this loop is long over.
    Body body = [this, block = block.get(), batch](Tape& t, const Var& in) {
      return block->forward(t, in, batch, inv_freq_);
    };
    stream = parts_.around(tape, stream, block->unit(), body);
  }
  return stream;
}

Var Stage::loss(Tape& tape, const Var& hidden, const MicroBatch& batch, const Tensor& scale) {
  require(head_ != nullptr, "this stage has no head: only the last stage knows the loss");
  Body body = [this, batch, scale](Tape& t, const Var& in) {
    Var normed = rmsnorm(t, in, head_->norm(), config_.norm_epsilon);
    return parts_.loss(t, normed, head_->weight(), batch, scale);
  };
  return parts_.around(tape, hidden, head_->unit(), body);
}

Var Stage::logits(Tape& tape, const Var& hidden) {
  require(head_ != nullptr, "this stage has no head: only the last stage knows the logits");
  Body body = [this](Tape& t, const Var& in) {
    Var normed = rmsnorm(t, in, head_->norm(), config_.norm_epsilon);
    return parts_.column(t, normed, {{&head_->weight()}});
  };
  return parts_.around(tape, hidden, head_->unit(), body);
}

Weights Stage::parameters() const {
  Weights all;
  for (Unit* unit : units_)
    for (const Weights& group : unit->groups) all.insert(all.end(), group.begin(), group.end());
  return all;
}

}  // namespace lockstep
