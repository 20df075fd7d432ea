#pragma once
// A linear layer whose weight is cut by columns, that is by outputs. Every rank needs all of x and
// makes some of the outputs:
//
//              x ─f─┬─▶ rank 0: x W0^T = y0          W = [W0]   outputs 0 … N/2 - 1
//                   └─▶ rank 1: x W1^T = y1              [W1]   outputs N/2 … N - 1
//
// Nothing is exchanged forward. Backward, each rank knows what x did to its own outputs; f adds up.
// What follows may go on with y0 and y1 apart: attention does (a head is a run of columns), swiglu
// does (element by element), and row_linear.h brings them back together.
//
// Under sequence parallelism a rank has rows of x, and g gathers the others', forward.

#include "04_tensor_parallel/conjugate_ops.h"

namespace lockstep {

inline Var column_linear(Tape& tape, const Var& x, const Projection& p, const Conjugates& ranks) {
  return linear(tape, ranks.enter(tape, x), p);
}

// With sequence parallelism, the gathered x need not be kept: backward can gather it again. One
// more all-gather, and [T, K] less of activations, for each such layer.
inline Var column_linear_gathering_again(Tape& tape, const Var& x, const Projection& p,
                                         Communicator& tp) {
  Tensor mine = x.value;
  auto input_adjoint = [p, &tp](const Gradients& d) -> Gradients {
    Tensor dx = d[0].like({d[0].dim(0), p.inputs()});
    input_gradient(dx, d[0], p);
    return {scattered_rows(dx, tp)};
  };
  auto weight_adjoint = [p, mine, &tp](const Gradients& d) {
    add_weight_gradient(p, d[0], gathered_rows(mine, tp));
  };
  Tensor whole = gathered_rows(mine, tp), y = mine.like({whole.dim(0), p.outputs()});
  multiply(y, whole, p);
  return tape.record("column_linear", {y}, {x}, input_adjoint, p.all(), weight_adjoint)[0];
}

}  // namespace lockstep
