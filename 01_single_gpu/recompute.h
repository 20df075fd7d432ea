#pragma once
// Activation recomputation: forget what a part of the model computed, and compute it again when
// backward gets there.
//
//              forward                               backward
//   none       every block keeps all it will need    uses it                   memory of all blocks
//   selective  a block forgets attention's inside    attention runs again      less, for little
//   work full       a block keeps only its input          the block runs again      one block at a
//   time
//
// "Inside" are the scores, their softmax and its product with v: they grow with the square of the
// sequence, and take few operations (Korthikanti et al., "Reducing activation recomputation in
// large transformer models", 2022, section 5). Full recomputation repeats the forward pass of all
// blocks: about a third more work.
//
// The same operations run on the same inputs in the same order, and dropout draws its mask again
// from the same indices (random.h), so gradients are bitwise those without recomputation.

#include "common/flops.h"
#include "common/parts.h"

namespace lockstep {

// Runs body and keeps x alone. When backward comes by, body runs again on a tape of its own, which
// is then replayed: its input adjoints in this entry's B, its weight adjoints in this entry's W.
inline Var recompute(Tape& tape, const Var& x, const Body& body) {
  Tape forgotten(Tape::Mode::Forget);
  Tensor input = x.value;
  Tensor out = body(forgotten, {input}).value;
  auto again = std::make_shared<Tape>(Tape::Mode::Record, Tape::Hooks::Silent);

  auto input_adjoint = [again, input, body](const Gradients& d) -> Gradients {
    Var leaf = again->leaf(input);
    again->backward(body(*again, leaf), d[0], Tape::WeightWork::Later);
    return {again->gradient(leaf)};
  };
  auto weight_adjoint = [again](const Gradients&) { again->weight_work(); };
  return tape.record("recompute", {out}, {x}, input_adjoint, forgotten.weights(),
                     weight_adjoint)[0];
}

// Blocks forget everything but their input. The embedding has nothing to forget, and the head is
// used right after it was computed.
inline void use_full_recomputation(Parts& parts) {
  AroundFn inner = parts.around;
  parts.around = [inner](Tape& tape, const Var& x, Unit& unit, const Body& body) {
    if (unit.kind != Unit::Block) return inner(tape, x, unit, body);
    return inner(tape, x, unit, [body](Tape& t, const Var& in) { return recompute(t, in, body); });
  };
}

// Attention forgets everything but q, k and v.
inline void use_selective_recomputation(Parts& parts) {
  AttentionFn inner = parts.attention;
  parts.attention = [inner](Tape& tape, const Var& qkv, const AttentionShape& shape) {
    return recompute(tape, qkv, [=](Tape& t, const Var& in) { return inner(t, in, shape); });
  };
}

inline void use_recomputation(Parts& parts, Recompute kind) {
  if (kind == Recompute::Full) use_full_recomputation(parts);
  if (kind == Recompute::Selective) use_selective_recomputation(parts);
}

}  // namespace lockstep
