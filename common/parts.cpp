#include "common/parts.h"

namespace lockstep {

Shard whole_shard(Shape whole) { return {whole, whole, -1, 0}; }

Shard cut_shard(Shape whole, int dim, Range range) {
  Shape local = whole;
  local[size_t(dim)] = range.count;
  if (local == whole) return whole_shard(whole);
  return {whole, local, dim, range.first};
}

IndexMap Shard::index_map() const {
  if (dim < 0) return {};  // strides of 1: the identity
  int64_t inner = 1;
  for (size_t d = size_t(dim) + 1; d < whole.size(); ++d) inner *= whole[d];
  return {local[size_t(dim)] * inner, whole[size_t(dim)] * inner, first * inner};
}

Parameter* Module::declare(std::string name, Shard shard, Init init, AxisSet replicas,
                           AxisSet sum_over) {
  Parameter& p = parameters_.emplace_back();
  p.name = std::move(name);
  p.shard = std::move(shard);
  p.init = init;
  p.replicas = replicas;
  p.sum_over = sum_over;
  return &p;
}

Parameter* Module::gain(const Parts& parts, const std::string& name, int64_t size) {
  Parameter* p =
      declare(name, whole_shard({size}), {Init::Ones, 0}, {Axis::Data, Axis::TP}, parts.stream);
  groups_.push_back({p});
  return p;
}

Projection Module::projection(const Parts& parts, const std::string& prefix, Along along,
                              const std::vector<Matrix>& matrices, bool bias, double std) {
  Projection p;
  for (const Matrix& m : matrices) {
    Shard shard = cut_shard({m.out, m.in}, along == Along::Columns ? 0 : 1, m.range);
    std::string name = prefix + m.name;
    AxisSet copies = AxisSet{Axis::Data}.with(m.copies);
    p.weights.push_back(declare(name + ".weight", shard, {Init::Normal, std}, copies, copies));
    if (!bias) continue;
    // The bias of a row-parallel matrix is added once, after the partial sums: every rank has it
    // all.
    bool cut = along == Along::Columns;
    p.biases.push_back(declare(name + ".bias",
                               cut ? cut_shard({m.out}, 0, m.range) : whole_shard({m.out}),
                               {Init::Zeros, 0}, cut ? copies : AxisSet{Axis::Data, Axis::TP},
                               cut ? copies : parts.stream));
  }
  groups_.push_back(p.weights);
  if (bias) groups_.push_back(p.biases);
  return p;
}

// down(silu(gate(x)) * up(x)); gate and up are one matmul.
class GatedFeedForward : public FeedForward {
 public:
  GatedFeedForward(const ModelConfig& c, const Parts& parts, const std::string& prefix)
      : parts_(parts) {
    Range columns = share(c.ffn, parts.tp);
    gate_up_ =
        projection(parts, prefix, Along::Columns,
                   {{"gate_proj", c.ffn, c.hidden, columns}, {"up_proj", c.ffn, c.hidden, columns}},
                   c.mlp_bias, c.init_std);
    down_ = projection(parts, prefix, Along::Rows, {{"down_proj", c.hidden, c.ffn, columns}},
                       c.mlp_bias, c.residual_std());
  }
  Var forward(Tape& tape, const Var& x, const MicroBatch&) override {
    return parts_.row(tape, swiglu(tape, parts_.column(tape, x, gate_up_)), down_);
  }

 private:
  const Parts& parts_;
  Projection gate_up_, down_;
};

Parts plain_parts() {
  Parts parts;
  parts.column =
      parts.row = [](Tape& tape, const Var& x, const Projection& p) { return linear(tape, x, p); };
  parts.embedding = [](Tape& tape, Parameter& table, const Tensor& ids) {
    return embedding(tape, table, ids);
  };
  parts.attention = plain_attention;
  parts.loss = [](Tape& tape, const Var& normed, Parameter& head, const MicroBatch& batch,
                  const Tensor& scale) {
    return cross_entropy(tape, linear(tape, normed, {{&head}}), batch.targets, scale);
  };
  parts.feed_forward = [](const ModelConfig& config, const Parts& p, const std::string& prefix) {
    return std::make_unique<GatedFeedForward>(config, p, prefix);
  };
  parts.around = [](Tape& tape, const Var& x, Unit&, const Body& body) { return body(tape, x); };
  return parts;
}

}  // namespace lockstep
