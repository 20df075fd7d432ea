#pragma once
// The sum of a gradient needs nothing but that gradient. So it starts as soon as backward has
// finished it, and travels while backward goes on with earlier layers:
//
//   compute   forward | backward 9 … 1 0  |      | optimizer
//   network                   | p9 | p8 | … | p0 |
//
// The tape says when: on_grad_ready runs after a parameter's last weight gradient. With
// accumulation only the last micro-batch's starts anything: the sum of sums is one sum.
//
// Same bytes as naive.h, as many collectives, most of them hidden. What is left to improve: a norm
// gain has as few bytes as a collective has overhead (bucketed.h).

#include <optional>

#include "02_data_parallel/launch_order.h"
#include "02_data_parallel/naive.h"

namespace lockstep {

class Overlapped : public Naive {
 public:
  using Naive::Naive;

  void allocate() override {
    Naive::allocate();
    pieces_ = cut();
    std::vector<Weights> parameters;
    for (const Piece& piece : pieces_) parameters.push_back(piece.parameters);
    auto launch = [this](size_t i) {
      pieces_[i].sum = mesh_.data().all_reduce(pieces_[i].gradients);
    };
    order_.emplace(chunks_, parameters, LaunchOrder::Each::Step, launch);
    for (Stage* stage : chunks_)
      for (Parameter* p : stage->parameters())
        p->on_grad_ready = [this](Parameter& done) { order_->ready(done); };
  }

  void begin_step(int64_t micro_batches) override {
    Naive::begin_step(micro_batches);
    order_->begin(micro_batches);
  }

  void finish() override {
    order_->finish();
    for (Piece& piece : pieces_) {
      piece.sum.wait();
      sum_over_model_axes(mesh_, piece.parameters, piece.gradients);
    }
  }

 protected:
  // What travels at once.
  struct Piece {
    Weights parameters;
    Tensor gradients;
    Work sum = {};
  };
  virtual std::vector<Piece> cut() {
    std::vector<Piece> pieces;
    for (size_t i = owned_.size(); i-- > 0;)
      pieces.push_back({{owned_[i].parameter}, owned_[i].grad});
    return pieces;
  }

 private:
  std::vector<Piece> pieces_;
  std::optional<LaunchOrder> order_;
};

}  // namespace lockstep
