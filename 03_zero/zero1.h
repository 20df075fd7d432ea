#pragma once
// ZeRO stage 1: every rank holds all weights and all gradients, but updates only its shard of them,
// and so keeps masters and moments for that shard alone.
//
//   memory    weights 2Ψ + gradients 2Ψ + (master 4 + moments 8)Ψ/N      (bf16, Ψ parameters)
//
//   step      backward ─▶ reduce-scatter gradients ─▶ update own shard ─▶ all-gather weights
//   rank 0                [Σ0|  .  |  .  ]             [w0|  .  |  . ]     [w0 w1 w2]
//   rank 1                [ . | Σ1 |  .  ]             [ . | w1 |  . ]     [w0 w1 w2]
//
// An all-reduce is a reduce-scatter and an all-gather: the same bytes as plain data parallelism,
// 2Ψ, only that weights travel in the second half instead of gradients. The reduce-scatter hides
// behind backward like the buckets of 02; the all-gather, behind the optimizer step or behind the
// next forward, in which a block waits for its own weights only (Gather).

#include <deque>
#include <exception>
#include <optional>
#include <unordered_map>

#include "02_data_parallel/copies.h"
#include "02_data_parallel/launch_order.h"
#include "03_zero/flat_shards.h"

namespace lockstep {

class Zero1 : public DataParallel {
 public:
  enum class Gather : uint8_t { DuringOptimizer, DuringForward };
  Zero1(std::vector<Stage*> chunks, ProcessMesh& mesh, Settings settings,
        Gather gather = Gather::DuringForward)
      : DataParallel(std::move(chunks), settings), mesh_(mesh), gather_(gather) {}

  ~Zero1() override {  // the last step's weights may still be on their way
    if (std::uncaught_exceptions() > 0) return;
    for (Shards& s : shards_) s.gathering.wait();
  }

  void allocate() override {
    for (Bucket& bucket : buckets()) shards_.emplace_back().bucket = std::move(bucket);
    allocate_values();
    allocate_gradients();
    std::vector<Weights> parameters;
    for (Shards& s : shards_) {
      Cut data{mesh_.data().rank(), mesh_.data().size()};
      auto counted = [this](const Parameter& p) { return counts(p, 0); };
      for (Owned& o : owned_of(s.bucket, s.value, s.grad, data, counted))
        owned_.push_back(std::move(o));
      s.owned_end = owned_.size();
      for (Parameter* p : s.bucket.parameters) shard_of_[p] = &s;
      parameters.push_back(s.bucket.parameters);
    }
    auto launch = [this](size_t i) { reduce(shards_[i]); };
    order_.emplace(chunks_, parameters, reduces(), launch);
    for (auto& [p, shards] : shard_of_)
      p->on_grad_ready = [this](Parameter& done) { order_->ready(done); };
  }

  void begin_step(int64_t micro_batches) override {
    for (Shards& s : shards_) zero(s.whole_grad);
    order_->begin(micro_batches);
  }

  void finish() override {
    order_->finish();
    settle();
    for (Shards& s : shards_) {
      sum_over_model_axes(mesh_, s.bucket.parameters, s.grad, first_of(s));
      s.gathering.wait();  // of weights that no unit has asked for
    }
  }

  // Known at once, not at the end of the step: a sum that starts in every micro-batch, or between
  // two gathers (zero3.h), must start at the same place on ranks that have used the parameter.
  void unused(Parameter& p) override { order_->ready(p, /*used=*/false); }

  void updated(size_t i) override {
    if (gather_ == Gather::DuringOptimizer) gather_updated(i + 1);
  }

  void publish() override {
    if (gather_ == Gather::DuringForward) {
      for (size_t i = shards_.size(); i-- > 0;) gather(shards_[i]);  // as forward will ask for them
      return;
    }
    gather_updated(owned_.size());
    for (Shards& s : shards_) s.gathering.wait();
    gathered_ = 0;
  }

  void acquire(Unit& unit, Pass) override {
    for (Parameter* p : unit.uses()) shard_of_.at(p)->gathering.wait();
  }

 protected:
  // A bucket, and what this rank has of it.
  struct Shards {
    Bucket bucket;
    Tensor whole_value, value;  // all of it and the own slice
    Tensor whole_grad, grad;
    Work reduction = {}, gathering = {};
    size_t owned_end = 0;    // one behind the last of owned() that lies in it
    bool holds_sum = false;  // grad has a micro-batch of this step (zero2.h)
    int users = 0;           // units that have it acquired (zero3.h)
  };

  virtual std::vector<Bucket> buckets() { return make_buckets(chunks_, bucket_elements()); }
  virtual LaunchOrder::Each reduces() const { return LaunchOrder::Each::Step; }

  void allocate_values() override {
    for (Shards& s : shards_) {
      s.whole_value = padded(s, s.bucket.stage->compute(), Category::Weights);
      s.value = own(s.whole_value);
      give_out(s.bucket, s.whole_value, &Parameter::value);
    }
  }
  void allocate_gradients() override {
    for (Shards& s : shards_) {
      s.whole_grad = padded(s, gradient_type(*s.bucket.stage), Category::Gradients);
      s.grad = own(s.whole_grad);
      give_out(s.bucket, s.whole_grad, &Parameter::grad);
    }
  }
  // A gradient of all micro-batches, or of one, is complete.
  virtual void reduce(Shards& s) {
    s.reduction = mesh_.data().reduce_scatter(s.whole_grad, s.grad);
  }
  // Waits for what is under way.
  virtual void settle() {
    for (Shards& s : shards_) s.reduction.wait();
  }
  virtual void gather(Shards& s) { s.gathering = mesh_.data().all_gather(s.value, s.whole_value); }

  // The next buckets, as far as their pieces are among the first `done` of owned(). A rank may own
  // nothing of a small bucket: its gather still has its place in the order.
  void gather_updated(size_t done) {
    while (gathered_ < shards_.size() && shards_[gathered_].owned_end <= done)
      gather(shards_[gathered_++]);
  }

  // Other ranks of the data axis have other shards.
  bool counts(const Parameter& p, size_t number) const override {
    return counts_copies(mesh_, p.replicas.without(kDataAxes), number);
  }
  int64_t bucket_elements() const {
    return settings_.bucket_bytes / int64_t(size_of(gradient_type(*chunks_[0])));
  }
  Sharding sharding(const Shards& s) const { return {s.bucket.size, mesh_.data().size()}; }
  Tensor padded(const Shards& s, DType type, Category category) const {
    Tensor memory = Tensor::empty({sharding(s).padded()}, type, s.bucket.stage->device(), category);
    zero(memory.flat(s.bucket.size, sharding(s).pad()));  // sums of padding stay zero
    return memory;
  }
  int64_t first_of(const Shards& s) const { return mesh_.data().rank() * s.grad.size(); }
  Tensor own(const Tensor& whole) const {
    int64_t shard = whole.size() / mesh_.data().size();
    return whole.flat(mesh_.data().rank() * shard, shard);
  }

  ProcessMesh& mesh_;
  Gather gather_;
  std::deque<Shards> shards_;
  size_t gathered_ = 0;  // during the optimizer: so many of them, so far
  std::unordered_map<Parameter*, Shards*> shard_of_;
  std::optional<LaunchOrder> order_;
};

}  // namespace lockstep
