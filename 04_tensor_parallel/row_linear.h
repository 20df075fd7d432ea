#pragma once
// A linear layer whose weight is cut by rows, that is by inputs. A rank has some columns of x and
// makes a part of the sum in every output:
//
//   rank 0:  x0 W0^T ─┐
//                     ├─f*─▶ y, the same on all ranks          W = [W0 | W1]
//   rank 1:  x1 W1^T ─┘
//
// One all-reduce forward, none backward: dy is the same everywhere, and each rank wants the
// gradient of its own columns only. So a column-linear followed by a row-linear (q|k|v then o,
// gate|up then down) costs one all-reduce forward and one backward; in the other order each of the
// two would pay.
//
// The bias is added once, behind the sum: added before it, it would count N times.
// Under sequence parallelism g* leaves each rank its rows of y only.

#include "04_tensor_parallel/conjugate_ops.h"

namespace lockstep {

inline Var row_linear(Tape& tape, const Var& x, const Projection& p, const Conjugates& ranks) {
  Var y = ranks.leave(tape, linear(tape, x, {p.weights}));
  return p.biases.empty() ? y : add_bias(tape, y, p.biases);
}

}  // namespace lockstep
