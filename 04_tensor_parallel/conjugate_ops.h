#pragma once
// Four communications and their gradients. Each comes with its conjugate, the operation that its
// backward runs; both stand side by side:
//
//                 forward                     backward
//   f             x, as it is                 all-reduce            x: the same on all ranks
//   f*            all-reduce                  d, as it is           x: a part of a sum on each
//   g             all-gather of rows          reduce-scatter        x: rows of its own on each
//   g*            reduce-scatter of rows      all-gather            x: a part of a sum, all rows
//
// f and g lead into a region in which ranks hold different columns of the weights, f* and g* lead
// out of it. f with f* is tensor parallelism; g with g* adds sequence parallelism, in which ranks
// hold different rows outside of that region. (Names as in The Ultra-Scale Playbook; Megatron-LM
// calls our f* "g", and our g and g* "g" and "g-bar".) Shoeybi et al., "Megatron-LM" (2019),
// section 3; Korthikanti et al., "Reducing activation recomputation" (2022), section 4.
//
// What makes a pair conjugate: <f(x), y> = <x, f*(y)>, summed over ranks. A test checks it.

#include "common/comm.h"
#include "common/ops.h"

namespace lockstep {

// In place only on a copy: an adjoint's argument belongs to others, too.
inline Tensor summed_over_ranks(const Tensor& t, Communicator& tp) {
  if (tp.size() == 1) return t;
  Tensor sum = t.like();
  copy(sum, t);
  tp.all_reduce(sum).wait();
  return sum;
}
// [T/N, …] of each rank -> [T, …]
inline Tensor gathered_rows(const Tensor& mine, Communicator& tp) {
  if (tp.size() == 1) return mine;
  Shape shape = mine.shape();
  shape[0] *= tp.size();
  Tensor whole = mine.like(shape);
  tp.all_gather(mine, whole).wait();
  return whole;
}
// [T, …], a part of a sum -> the sum's [T/N, …] for this rank
inline Tensor scattered_rows(const Tensor& part, Communicator& tp) {
  if (tp.size() == 1) return part;
  Shape shape = part.shape();
  shape[0] /= tp.size();
  Tensor mine = part.like(shape);
  tp.reduce_scatter(part, mine).wait();
  return mine;
}

inline Var f(Tape& tape, const Var& x, Communicator& tp) {
  auto adjoint = [&tp](const Gradients& d) -> Gradients { return {summed_over_ranks(d[0], tp)}; };
  return tape.record("f", {x.value}, {x}, adjoint)[0];
}
inline Var f_star(Tape& tape, const Var& x, Communicator& tp) {
  auto adjoint = [](const Gradients& d) -> Gradients { return {d[0]}; };
  return tape.record("f*", {summed_over_ranks(x.value, tp)}, {x}, adjoint)[0];
}

inline Var g(Tape& tape, const Var& x, Communicator& tp) {
  auto adjoint = [&tp](const Gradients& d) -> Gradients { return {scattered_rows(d[0], tp)}; };
  return tape.record("g", {gathered_rows(x.value, tp)}, {x}, adjoint)[0];
}
inline Var g_star(Tape& tape, const Var& x, Communicator& tp) {
  auto adjoint = [&tp](const Gradients& d) -> Gradients { return {gathered_rows(d[0], tp)}; };
  return tape.record("g*", {scattered_rows(x.value, tp)}, {x}, adjoint)[0];
}

// Into the region of cut columns, and out of it again.
struct Conjugates {
  Communicator& tp;
  bool sequence_parallel = false;
  Var enter(Tape& tape, const Var& x) const {
    return sequence_parallel ? g(tape, x, tp) : f(tape, x, tp);
  }
  Var leave(Tape& tape, const Var& x) const {
    return sequence_parallel ? g_star(tape, x, tp) : f_star(tape, x, tp);
  }
};

}  // namespace lockstep
