#pragma once
// Data parallelism, as simple as it can be: every rank holds the whole model and reads other
// samples; after backward, gradients are summed over all ranks, one parameter after the other.
//
//   compute   forward | backward          |                      | optimizer
//   network                               | p9 | p8 | … | p1 | p0 |
//                                           nobody computes meanwhile
//
// Every rank then takes the same optimizer step, so that the copies of the weights stay equal bit
// by bit. The sum is over gradients of a loss that was divided by the tokens of *all* ranks: no
// average is taken, and uneven batches are right.
//
// What moves: one all-reduce of each gradient, together the model's size, once a step however many
// micro-batches it has. A rank sends 2 (N-1)/N of it.

#include "02_data_parallel/copies.h"
#include "common/strategy.h"

namespace lockstep {

class Naive : public DataParallel {
 public:
  Naive(std::vector<Stage*> chunks, ProcessMesh& mesh, Settings settings)
      : DataParallel(std::move(chunks), settings), mesh_(mesh) {}

  void finish() override {
    for (size_t i = owned_.size(); i-- > 0;) {
      mesh_.data().all_reduce(owned_[i].grad).wait();
      sum_over_model_axes(mesh_, {owned_[i].parameter}, owned_[i].grad);
    }
  }

 protected:
  bool counts(const Parameter& p, size_t number) const override {
    return counts_copies(mesh_, p.replicas, number);
  }

  ProcessMesh& mesh_;
};

}  // namespace lockstep
