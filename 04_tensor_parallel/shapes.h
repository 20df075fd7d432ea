#pragma once
// What shape the activations have in each region of a block, and a watch that stops the run where
// they come out otherwise. T rows, H hidden, N ranks:
//
//   region                   TP              TP + sequence parallel
//   stream, norms            [T, H]          [T/N, H]
//   after column-linear      [T, width/N]    [T, width/N]         q|k|v, gate|up, logits
//   after attention          [T, heads/N]    [T, heads/N]
//   after row-linear         [T, H]          [T/N, H]

#include <cstdio>

#include "04_tensor_parallel/use_tensor_parallel.h"

namespace lockstep {

class ShapeTable {
 public:
  ShapeTable(const ModelConfig& c, const TensorParallel& how, Cut tp)
      : config_(c), spread_(how.sequence_parallel), tp_(tp) {}

  int64_t stream_rows(int64_t rows) const { return spread_ ? rows / tp_.size : rows; }
  int64_t heads_width() const { return config_.heads / tp_.size * config_.head_dim; }

  void expect(const char* region, const Tensor& t, Shape shape) const {
    require(t.shape() == shape, "rank ", tp_.rank, " of TP", tp_.size, " has ", t.shape(), " ",
            region, ", which should be ", shape);
  }
  void print(int64_t rows) const {
    const ModelConfig& c = config_;
    int64_t kv = std::max<int64_t>(1, c.kv_heads / tp_.size) * c.head_dim;
    int64_t ffn = share(c.ffn, tp_).count, vocab = share(c.vocab, tp_).count;
    auto line = [](const char* region, int64_t rows, int64_t columns) {
      std::printf("shapes  %-22s %8lld x %lld\n", region, static_cast<long long>(rows),
                  static_cast<long long>(columns));
    };
    line("stream, norms", stream_rows(rows), c.hidden);
    line("q|k|v", rows, heads_width() + 2 * kv);
    line("attention", rows, heads_width());
    line("o, back in the stream", stream_rows(rows), c.hidden);
    line("gate|up", rows, 2 * ffn);
    line("down, in the stream", stream_rows(rows), c.hidden);
    line("logits", rows, vocab);
  }

 private:
  ModelConfig config_;
  bool spread_;
  Cut tp_;
};

inline void watch_shapes(Parts& parts, const ShapeTable& table) {
  parts.column = [inner = parts.column, &table](Tape& tape, const Var& x, const Projection& p) {
    Var y = inner(tape, x, p);
    table.expect("into a column-linear", x.value, {table.stream_rows(y.value.dim(0)), p.inputs()});
    table.expect("out of a column-linear", y.value, {y.value.dim(0), p.outputs()});
    return y;
  };
  parts.attention = [inner = parts.attention, &table](Tape& tape, const Var& qkv,
                                                      const AttentionShape& shape) {
    Var y = inner(tape, qkv, shape);
    table.expect("after attention", y.value, {qkv.value.dim(0), table.heads_width()});
    return y;
  };
  parts.row = [inner = parts.row, &table](Tape& tape, const Var& x, const Projection& p) {
    Var y = inner(tape, x, p);
    table.expect("out of a row-linear", y.value,
                 {table.stream_rows(x.value.dim(0)), p.weights[0]->shard.local[0]});
    return y;
  };
}

}  // namespace lockstep
