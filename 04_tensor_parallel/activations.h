#pragma once
// How many bytes of activations a rank keeps until backward. common/memory_model.h derives the
// count for one rank; here N ranks share it. Per token of one block, in elements (H hidden, Q and
// KV the widths of q and of k, F ffn, A heads, S sequence):
//
//                                  TP                 + sequence parallel   + gathering again
//   norm      keeps x              H                  H/N                   H/N
//   q|k|v     keeps its input      H                  H   what g gathered   H/N   its own rows
//   attention keeps q|k|v, probs   (Q + 2KV + AS)/N   (Q + 2KV + AS)/N      (Q + 2KV + AS)/N
//   o         keeps its input      Q/N                Q/N                   Q/N
//   norm      keeps x + a          H                  H/N                   H/N
//   gate|up   keeps its input      H                  H                     H/N
//   swiglu, down keep theirs       3F/N               3F/N                  3F/N
//   and a norm one fp32 number     2                  2/N                   2/N
//
// So what all ranks repeat is 4H, then 2H, then nothing: with gathering again a block costs 1/N. f
// and f*, g and g* keep nothing themselves. Overlap keeps what it has gathered, like g. The head
// likewise: x, its input, and V/N logits; the log-sum-exp of all rows on every rank.
//
// In 16 bits with one-byte masks, Korthikanti et al. (2022), table 2, s b h times
//
//   10 + 24/N + 5as/(hN)           34/N + 5as/(hN)       their g gathers again, in backward

#include "04_tensor_parallel/use_tensor_parallel.h"
#include "common/memory_model.h"

namespace lockstep {

struct RankActivations {
  int64_t block, head;  // bytes
  int64_t stored;       // all blocks and the head: what is kept when forward ends
};

inline RankActivations rank_activations(const ModelConfig& c, BatchShape batch, DType compute,
                                        Cut tp, const TensorParallel& how) {
  int64_t tokens = batch.tokens(), element = int64_t(size_of(compute));
  int64_t number = int64_t(size_of(sum_type(compute)));
  int64_t rows = how.sequence_parallel ? tokens / tp.size : tokens;  // of the stream
  int64_t kept = how.gather_again ? rows : tokens;                   // of a column-linear's input
  int64_t q = c.q_size() / tp.size, f = share(c.ffn, tp).count, v = share(c.vocab, tp).count;
  int64_t kv = std::max<int64_t>(1, c.kv_heads / tp.size) * c.head_dim;
  int64_t probs = c.heads / tp.size * batch.length;

  RankActivations a{};
  a.block = (2 * rows * c.hidden + 2 * kept * c.hidden) * element +
            tokens * (2 * q + 2 * kv + 3 * f + probs) * element + 2 * rows * number;
  a.head = (rows * c.hidden + kept * c.hidden + tokens * v) * element + (rows + tokens) * number +
           number;  // the loss
  a.stored = c.layers * a.block + a.head;
  return a;
}

// L s b h (10 + 24/N + 5as/hN), or (34/N + 5as/hN) with sequence parallelism.
inline double source_rank_activations(double layers, double length, double sequences, double hidden,
                                      double heads, double ranks, bool sequence_parallel) {
  double attention = 5 * heads * length / hidden / ranks;
  double rest = sequence_parallel ? 34 / ranks : 10 + 24 / ranks;
  return layers * length * sequences * hidden * (rest + attention);
}

}  // namespace lockstep
