#pragma once
// Sequence parallelism: where tensor parallelism leaves work undivided (norms, dropout, residual
// sums: token by token), ranks take different rows instead of repeating the same ones.
//
//   region          without (rows, columns)      with
//   stream, norms   T, H   on every rank          T/N, H        1/N of the activations
//        f │ g      ─────                         all-gather
//   q|k|v, attend   T, 3H/N                       T, 3H/N
//   gate|up         T, 2F/N                       T, 2F/N
//        f*│ g*     all-reduce                    reduce-scatter
//   stream          T, H   on every rank          T/N, H
//
// An all-reduce is a reduce-scatter and an all-gather: the same bytes move. What changes is that a
// norm's gain, held by all ranks, now meets only a rank's own rows: its gradient is a part of a sum
// over TP. That is the one thing to remember, and the model has it as a property of the stream
// (Parts::stream); forget it and replicas drift apart slowly, while the loss still falls.
//
// A micro-batch's rows are its sequences one behind the other, cut into N equal runs.

#include "common/parts.h"

namespace lockstep {

inline void spread_stream_over_rows(Parts& parts) {
  parts.stream = {Axis::Data, Axis::TP};
  parts.stream_rows = parts.tp;
}

}  // namespace lockstep
