#pragma once
// ZeRO stage 2: a rank also keeps only its shard of the gradients. The whole gradient of a bucket
// exists from its first weight gradient to its reduce-scatter, and is then freed:
//
//   memory    weights 2Ψ + (gradients 2 + master 4 + moments 8)Ψ/N, and two buckets (with tied
//             embeddings theirs as well, from the head's backward on)
//
//   backward  block 9 ▶ [whole] ─reduce-scatter▶ [shard], free [whole]
//             block 8            ▶ [whole] ─▶ …      at most one reduction is under way
//
// The price: with m micro-batches the reduce-scatter runs m times, because nobody has room for the
// sum of whole gradients. (m + 1)Ψ move instead of 2Ψ.

#include "03_zero/zero1.h"

namespace lockstep {

class Zero2 : public Zero1 {
 public:
  using Zero1::Zero1;

  void begin_step(int64_t micro_batches) override {
    for (Shards& s : shards_) s.holds_sum = false;
    order_->begin(micro_batches);
  }

 protected:
  std::vector<Bucket> buckets() override {
    return make_buckets(chunks_, bucket_elements(), CutAt::Units);
  }
  LaunchOrder::Each reduces() const override { return LaunchOrder::Each::MicroBatch; }

  void allocate_gradients() override {
    for (Shards& s : shards_) {
      s.grad = Tensor::empty({sharding(s).shard()}, gradient_type(*s.bucket.stage),
                             s.bucket.stage->device(), Category::Gradients);
      for (Parameter* p : s.bucket.parameters) p->need_grad = [this, &s](Parameter&) { open(s); };
    }
  }

  // Memory for the whole gradient, before the first is added.
  void open(Shards& s) {
    if (in_flight_ == &s) settle();
    if (s.whole_grad.defined()) return;
    s.whole_grad = padded(s, s.grad.dtype(), Category::Buffers);
    zero(s.whole_grad);
    give_out(s.bucket, s.whole_grad, &Parameter::grad);
  }

  void reduce(Shards& s) override {
    settle();
    open(s);  // no micro-batch has touched it on this rank: zeros
    // The first sum of a step is written into the shard, later ones are added in settle().
    Tensor sum = s.holds_sum ? own(s.whole_grad) : s.grad;
    s.reduction = mesh_.data().reduce_scatter(s.whole_grad, sum);
    in_flight_ = &s;
  }

  // Waits for the reduction under way, adds it to those of earlier micro-batches, frees the rest.
  void settle() override {
    if (!in_flight_) return;
    Shards& s = *std::exchange(in_flight_, nullptr);
    s.reduction.wait();
    if (std::exchange(s.holds_sum, true)) on(s.grad).add_into(s.grad, own(s.whole_grad));
    s.whole_grad = {};
    for (Parameter* p : s.bucket.parameters) p->grad = {};
  }

  Shards* in_flight_ = nullptr;
};

}  // namespace lockstep
