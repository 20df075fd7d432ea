#pragma once
// In which order sums start. Backward finishes gradients from the last layer to the first, but not
// in the same order on every rank: one may skip a layer, or meet two in another order. Collectives
// must start in the same order everywhere, or rank 0's first sum meets rank 1's second. So there is
// one order, fixed before training, and a bucket that is ready early waits for its turn:
//
//   ready here         b2   b0   b1        (b: gradients that travel together)
//   launched                b0   b1,b2     finish() launches what is left: an unused parameter
//                                          contributes zero
//
// With accumulation a bucket is launched once a step, or once in every micro-batch.

#include <cstdio>
#include <functional>
#include <unordered_map>
#include <unordered_set>

#include "common/model.h"

namespace lockstep {

class LaunchOrder {
 public:
  enum class Each : uint8_t { Step, MicroBatch };
  // buckets: their parameters, in the order in which they are to start. launch(b) starts bucket b.
  LaunchOrder(const std::vector<Stage*>& chunks, std::vector<Weights> buckets, Each each,
              std::function<void(size_t)> launch)
      : buckets_(std::move(buckets)), each_(each), launch_(std::move(launch)) {
    for (Stage* stage : chunks)
      for (Parameter* p : used_by(*stage)) ++tapes_[p];
  }

  void begin(int64_t micro_batches) {
    micro_batches_ = micro_batches;
    rounds_ = each_ == Each::Step ? 1 : micro_batches;
    next_ = 0;
    ready_.clear();
    used_.clear();
  }
  // A tape has added its last gradient to p, or will add none.
  void ready(Parameter& p, bool used = true) {
    ++ready_[&p];
    if (used) used_.insert(&p);
    while (next_ < rounds_ * int64_t(buckets_.size()) && complete(next_)) launch(next_++);
  }
  void finish() {
    for (; next_ < rounds_ * int64_t(buckets_.size()); ++next_) launch(next_);
    for (const Weights& bucket : buckets_)
      for (Parameter* p : bucket)
        if (!used_.contains(p) && named_.insert(p).second)
          std::fprintf(stderr, "%s took no part in a step: its gradient is zero\n",
                       p->name.c_str());
  }

 private:
  // Each once, the tied table too: one tape is one use, however often it reads the table.
  static std::unordered_set<Parameter*> used_by(const Stage& stage) {
    std::unordered_set<Parameter*> all;
    for (Unit* unit : stage.units())
      for (Parameter* p : unit->uses()) all.insert(p);
    return all;
  }
  size_t bucket(int64_t number) const { return size_t(number) % buckets_.size(); }
  int64_t round(int64_t number) const { return number / int64_t(buckets_.size()); }
  void launch(int64_t number) { launch_(bucket(number)); }
  bool complete(int64_t number) {
    int64_t wanted = each_ == Each::Step ? micro_batches_ : round(number) + 1;
    for (Parameter* p : buckets_[bucket(number)])
      if (ready_[p] < wanted * tapes_[p]) return false;
    return true;
  }

  std::vector<Weights> buckets_;
  Each each_;
  std::function<void(size_t)> launch_;
  std::unordered_map<Parameter*, int64_t> tapes_, ready_;  // in a micro-batch; so far in this step
  int64_t micro_batches_ = 0, rounds_ = 0, next_ = 0;
  std::unordered_set<Parameter*> used_, named_;  // in this step; once is enough
};

}  // namespace lockstep
