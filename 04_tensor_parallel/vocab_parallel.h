#pragma once
// The two largest matrices, the embedding's table and the head, are cut by vocabulary.
//
//   embedding   rank 0 has rows 0 … V/2 - 1. It looks up the ids it has and puts zeros for the
//               others; f* (or g*) adds up, and every token has come from exactly one rank.
//   head        column-linear: rank 0 makes the logits of ids 0 … V/2 - 1.
//   loss        the softmax needs the sum over all logits, but only the sum:
//
//                 each rank, for each token      log Σ exp(its logits),  the target's logit if it
//                 has it all_gather                     2 numbers a token and rank, instead of V
//                 then                           loss = log Σ exp(those sums) - target's logit
//
// The logits [T, V] are never together. A vocabulary that does not divide is cut unevenly: there
// are no rows of padding that could enter the softmax.

#include "04_tensor_parallel/conjugate_ops.h"

namespace lockstep {

inline Var vocab_parallel_embedding(Tape& tape, Parameter& table, const Tensor& ids,
                                    const Conjugates& ranks) {
  return ranks.leave(tape, embedding(tape, table, ids, table.shard.first));
}

// logits [T, V/N]: this rank's columns first, first + 1, …
inline Var vocab_parallel_cross_entropy(Tape& tape, const Var& in, const Tensor& targets,
                                        const Tensor& scale, int64_t first, Communicator& tp) {
  Tensor logits = in.value;
  DType sums = sum_type(logits.dtype());
  int64_t rows = logits.dim(0);
  auto number = [&](Shape shape) { return Tensor::empty(shape, sums, logits.device()); };
  Tensor mine = number({2, rows}), all = number({tp.size(), 2, rows});
  on(logits).vocab_statistics(mine, logits, targets, first);
  tp.all_gather(mine, all).wait();
  Tensor loss = number({1}), lse = number({rows});
  on(logits).vocab_cross_entropy(loss, lse, all, targets, scale);

  auto adjoint = [=](const Gradients& d) -> Gradients {
    Tensor d_logits = logits.like();
    on(logits).cross_entropy_backward(d_logits, d[0], logits, lse, targets, scale, first);
    return {d_logits};
  };
  return tape.record("vocab_parallel_cross_entropy", {loss}, {in}, adjoint)[0];
}

}  // namespace lockstep
