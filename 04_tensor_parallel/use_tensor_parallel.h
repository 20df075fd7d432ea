#pragma once
// Tensor parallelism for the whole model: which parts of it are exchanged.
//
//   stream ─ norm ─ enter ─ q|k|v ─ attention on own heads ─ o ─ leave ─(+)─
//          ─ norm ─ enter ─ gate|up ─ swiglu on own columns ─ down ─ leave ─(+)─ stream
//
// Two times in and two times out of the cut region per layer: two all-reduces forward and two
// backward, or two all-gathers and two reduce-scatters each way with sequence parallelism.

#include "04_tensor_parallel/column_linear.h"
#include "04_tensor_parallel/overlap.h"
#include "04_tensor_parallel/row_linear.h"
#include "04_tensor_parallel/sequence_parallel.h"
#include "04_tensor_parallel/vocab_parallel.h"

namespace lockstep {

struct TensorParallel {
  bool sequence_parallel = false;
  bool gather_again = false;  // in backward, instead of keeping what was gathered (with SP)
  int overlap = 0;            // chunks whose communication hides behind matmuls (with SP); 0: none
};

// One sentence about the first thing that cannot be cut over `ranks`; before any work.
inline void check_tensor_parallel(const ModelConfig& c, int64_t length, int ranks,
                                  const TensorParallel& how) {
  require(c.heads % ranks == 0, c.heads, " heads cannot be cut over TP", ranks,
          ", which gives each rank as many: valid sizes are ", divisors(c.heads));
  require(c.kv_heads % ranks == 0 || ranks % c.kv_heads == 0, c.kv_heads,
          " key/value heads cannot be cut over TP", ranks,
          ": one must divide the other, so that each rank has whole heads, or one copy of one");
  require(c.ffn >= ranks && c.vocab >= ranks, "TP", ranks,
          " leaves ranks without a column: ffn is ", c.ffn, ", the vocabulary ", c.vocab);
  require(!how.sequence_parallel || length % ranks == 0, "sequence parallelism cuts sequences of ",
          length, " tokens over TP", ranks, ": use a length that is a multiple of ", ranks);
  require(how.sequence_parallel || (!how.gather_again && how.overlap == 0),
          "overlap and gathering again belong to sequence parallelism: add it");
  require(!how.gather_again || how.overlap == 0,
          "overlap keeps what it has gathered: use one of overlap and gathering again");
}

inline void use_tensor_parallel(Parts& parts, Communicator& tp, TensorParallel how = {}) {
  parts.tp = {tp.rank(), tp.size()};
  Conjugates ranks{tp, how.sequence_parallel};
  if (how.sequence_parallel) spread_stream_over_rows(parts);

  parts.column = [ranks, how](Tape& tape, const Var& x, const Projection& p) {
    if (how.overlap > 0) return Overlap(ranks.tp, how.overlap).column_linear(tape, x, p);
    if (how.gather_again) return column_linear_gathering_again(tape, x, p, ranks.tp);
    return column_linear(tape, x, p, ranks);
  };
  parts.row = [ranks, how](Tape& tape, const Var& x, const Projection& p) {
    if (how.overlap > 0) return Overlap(ranks.tp, how.overlap).row_linear(tape, x, p);
    return row_linear(tape, x, p, ranks);
  };
  parts.embedding = [ranks](Tape& tape, Parameter& table, const Tensor& ids) {
    return vocab_parallel_embedding(tape, table, ids, ranks);
  };
  parts.loss = [column = parts.column, ranks](Tape& tape, const Var& normed, Parameter& head,
                                              const MicroBatch& batch, const Tensor& scale) {
    Var logits = column(tape, normed, {{&head}});
    return vocab_parallel_cross_entropy(tape, logits, batch.targets, scale, head.shard.first,
                                        ranks.tp);
  };
}

}  // namespace lockstep
