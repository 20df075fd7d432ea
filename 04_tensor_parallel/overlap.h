#pragma once
// Sequence parallelism whose communication hides behind its own matmuls. Rows are independent, so a
// matmul can be cut into chunks of rows, and a chunk's communication runs beside another's matmul:
//
//   out of the region   matmul   c0 │ c1 │ c2 │ c3 │            row-linear forward, and the
//   (reduce-scatter)    network       c0   c1   c2   c3         input gradient of column-linear
//
//   into the region     network  p0   p1   p2   p3              column-linear forward, and the
//   (all-gather)        matmul   own  │ p0 │ p1 │ p2 │ p3 │     input gradient of row-linear
//
// A chunk of the reduce-scatter must hold rows for every rank: chunk c has the c-th piece of each
// rank's slice. The gather is made of messages instead, so that each piece lands where it belongs,
// and begins with a rank's own rows, for which it need not wait. The same bytes travel as with g
// and g*. More chunks hide more, and make matmuls too small to be fast.

#include <utility>

#include "04_tensor_parallel/conjugate_ops.h"

namespace lockstep {

class Overlap {
 public:
  Overlap(Communicator& tp, int chunks) : tp_(tp), chunks_(chunks) {}

  // x [T/N, K], rows of its own on each rank -> [T, this rank's outputs]
  Var column_linear(Tape& tape, const Var& x, const Projection& p) const {
    auto times = [p](const Tensor& y, const Tensor& rows) { multiply(y, rows, p); };
    Gathered forward = gather_and_multiply(x.value, p.outputs(), times);

    auto input_adjoint = [self = *this, p](const Gradients& d) -> Gradients {
      auto back = [&p](const Tensor& dx, const Tensor& dy) { input_gradient(dx, dy, p); };
      return {self.multiply_and_scatter(d[0], p.inputs(), back)};
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
    std::vector<Work> messages;
    for (Range piece : pieces(slice)) {
      std::vector<P2P> group;
      for (int r = 0; r < n; ++r) {
        if (r == me) continue;
        group.push_back({P2P::Send, r, mine.rows(piece.first, piece.count)});
        group.push_back({P2P::Receive, r, rows.rows(r * slice + piece.first, piece.count)});
      }
      messages.push_back(tp_.exchange(std::move(group)));
    }
    copy(rows.rows(me * slice, slice), mine);
    times(product.rows(me * slice, slice), mine);
    for (size_t i = 0; i < messages.size(); ++i) {
      messages[i].wait();
      Range piece = pieces(slice)[i];
      for (int r = 0; r < n; ++r) {
        if (r == me) continue;
        int64_t at = r * slice + piece.first;
        times(product.rows(at, piece.count), rows.rows(at, piece.count));
      }
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
