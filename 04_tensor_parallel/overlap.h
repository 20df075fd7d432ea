#pragma once
// Sequence parallelism whose communication hides behind matmuls. Rows are independent, so a matmul
// can be cut by rows, and the communication of some runs beside the matmul of others:
//
//   into the region     network  r1   r2   r3                   column-linear forward, and the
//   (all-gather)        matmul   own  │ r1 │ r2 │ r3 │          input gradient of row-linear
//
//   out of the region   matmul   c0 │ c1 │                      row-linear forward, in chunks of
//   (reduce-scatter)    network       c0   c1                   the rows of every rank
//
//   the same, backward  matmul   dx      │ dw        │          column-linear: the weight's
//   gradient
//                       network            scatter dx           is beside it, nothing need be cut
//
// The gather is made of messages, so that each rank's rows land where they belong, and a rank
// begins with its own, for which it need not wait. The same bytes travel as with g and g*. More
// chunks hide more, and make matmuls too small to be fast.

#include <utility>

#include "04_tensor_parallel/conjugate_ops.h"

namespace lockstep {

class Overlap {
 public:
  Overlap(Communicator& tp, int chunks) : tp_(tp), chunks_(chunks) { tp.connect(); }

  // x [T/N, K], rows of its own on each rank -> [T, this rank's outputs]
  Var column_linear(Tape& tape, const Var& x, const Projection& p) const {
    auto times = [p](const Tensor& y, const Tensor& rows) { multiply(y, rows, p); };
    Gathered forward = gather_and_multiply(x.value, p.outputs(), times);

    // One piece: its reduce-scatter hides behind the weight's gradient, which comes next.
    auto input_adjoint = [self = *this, p, &tape](const Gradients& d) -> Gradients {
      Tensor parts = d[0].like({d[0].dim(0), p.inputs()});
      Tensor mine = parts.like({parts.dim(0) / self.tp_.size(), p.inputs()});
      input_gradient(parts, d[0], p);
      auto scatter = std::make_shared<Work>(self.tp_.reduce_scatter(parts, mine));
      tape.settle_later([scatter] { scatter->wait(); });
      return {mine};
    };
    auto weight_adjoint = [p, whole = forward.rows](const Gradients& d) {
      add_weight_gradient(p, d[0], whole);
    };
    return tape.record("column_linear", {forward.product}, {x}, input_adjoint, p.all(),
                       weight_adjoint)[0];
  }

  // x [T, this rank's inputs] -> [T/N, H], rows of its own on each rank
  Var row_linear(Tape& tape, const Var& in, const Projection& p) const {
    Projection matrix{p.weights};
    Tensor x = in.value;
    auto times = [&](const Tensor& y, const Tensor& rows) { multiply(y, rows, matrix); };
    Tensor y = multiply_and_scatter(x, matrix.outputs(), times);

    auto whole_dy = std::make_shared<Tensor>();  // B gathers it, W uses it again
    auto input_adjoint = [self = *this, matrix, whole_dy](const Gradients& d) -> Gradients {
      auto back = [&](const Tensor& dx, const Tensor& dy) { input_gradient(dx, dy, matrix); };
      Gathered backward = self.gather_and_multiply(d[0], matrix.inputs(), back);
      *whole_dy = backward.rows;
      return {backward.product};
    };
    auto weight_adjoint = [matrix, x, whole_dy](const Gradients&) {
      add_weight_gradient(matrix, std::exchange(*whole_dy, {}), x);
    };
    Var out = tape.record("row_linear", {y}, {in}, input_adjoint, p.weights, weight_adjoint)[0];
    return p.biases.empty() ? out : add_bias(tape, out, p.biases);
  }

 private:
  using Times = std::function<void(const Tensor& product, const Tensor& rows)>;
  struct Gathered {
    Tensor rows, product;
  };

  // The sum over ranks of times(x), and of that this rank's rows.
  Tensor multiply_and_scatter(const Tensor& x, int64_t width, const Times& times) const {
    int64_t slice = x.dim(0) / tp_.size();
    Tensor mine = x.like({slice, width});
    std::vector<Work> scatters;
    for (Range piece : pieces(slice)) {
      Tensor parts = x.like({tp_.size() * piece.count, width});
      for (int r = 0; r < tp_.size(); ++r)
        times(parts.rows(r * piece.count, piece.count),
              x.rows(r * slice + piece.first, piece.count));
      scatters.push_back(tp_.reduce_scatter(parts, mine.rows(piece.first, piece.count)));
    }
    for (Work& scatter : scatters) scatter.wait();
    return mine;
  }

  // times() of all ranks' rows, and those rows.
  Gathered gather_and_multiply(const Tensor& mine, int64_t width, const Times& times) const {
    int64_t slice = mine.dim(0), me = tp_.rank(), n = tp_.size();
    Tensor rows = mine.like({n * slice, mine.dim(1)}), product = mine.like({n * slice, width});
    // From the next rank first, from the one before last: every rank is sent to by one at a time.
    std::vector<Work> messages;
    for (int64_t step = 1; step < n; ++step) {
      int from = int((me + step) % n), to = int((me + n - step) % n);
      messages.push_back(tp_.exchange(
          {{P2P::Send, to, mine}, {P2P::Receive, from, rows.rows(from * slice, slice)}}));
    }
    copy(rows.rows(me * slice, slice), mine);
    times(product.rows(me * slice, slice), mine);
    for (int64_t step = 1; step < n; ++step) {
      messages[size_t(step - 1)].wait();
      int64_t at = (me + step) % n * slice;
      times(product.rows(at, slice), rows.rows(at, slice));
    }
    return {rows, product};
  }

  std::vector<Range> pieces(int64_t slice) const {
    std::vector<Range> all;
    for (int c = 0; c < chunks_; ++c)
      if (Range piece = share(slice, {c, chunks_}); piece.count > 0) all.push_back(piece);
    return all;
  }

  Communicator& tp_;
  int chunks_;
};

}  // namespace lockstep
