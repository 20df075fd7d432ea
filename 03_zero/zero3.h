#pragma once
// ZeRO stage 3: a rank keeps only its shard of the weights, too. A unit's weights (embedding,
// block, head) are gathered just before it computes, and released at once:
//
//   memory    (weights 2 + gradients 2 + master 4 + moments 8)Ψ/N, and two units
//
//   forward   gather E, 0   1   2   …   H            backward   (H is still there)
//   compute            E │ 0 │ 1 │ … │ H              H │ … │ 1 │ 0 │ E
//   gather          0   1   2  …                          …  1   0   E      each behind the compute
//   release               E   0   1  …                 H  …     2   1   0   of its neighbour
//
// The last unit is kept from its forward to its backward, which follows at once. All others are
// gathered twice: 2U - 1 gathers for U units. Every micro-batch gathers again: 3mΨ move (less the
// head), two thirds of it weights.
//
// Adjoints hold the Parameter, not its tensors: a released weight is gone although the tape still
// has an entry that will need it.

#include "03_zero/zero2.h"

namespace lockstep {

class Zero3 : public Zero2 {
 public:
  using Zero2::Zero2;

  void updated(size_t) override {}
  void publish() override {  // the shards are the weights
    for (Shards& s : shards_) {
      require(s.users == 0, s.bucket.parameters[0]->name,
              " is still gathered when its shards have changed: a unit was not released");
      s.gathering.wait();
      drop(s);
    }
  }

  void acquire(Unit& unit, Pass pass) override {
    bool kept = unit.kind == Unit::Head && pass == Pass::Backward;
    for (Shards* s : shards_used_by(unit)) {
      fetch(*s);
      if (!kept) ++s->users;
    }
    if (Unit* next = neighbour(unit, pass))
      for (Shards* s : shards_used_by(*next)) fetch(*s);
    for (Shards* s : shards_used_by(unit)) s->gathering.wait();
  }

  void release(Unit& unit, Pass pass) override {
    if (unit.kind == Unit::Head && pass == Pass::Forward) return;
    for (Shards* s : shards_used_by(unit))
      if (--s->users == 0) drop(*s);
  }

 protected:
  std::vector<Bucket> buckets() override { return make_buckets(chunks_, INT64_MAX, CutAt::Units); }

  void allocate_values() override {
    for (Shards& s : shards_) {
      s.value = Tensor::zeros({sharding(s).shard()}, s.bucket.stage->compute(),
                              s.bucket.stage->device(), Category::Weights);
    }
  }

 private:
  // Starts to gather, unless it is there or on its way.
  void fetch(Shards& s) {
    if (s.whole_value.defined()) return;
    s.whole_value =
        Tensor::empty({sharding(s).padded()}, s.value.dtype(), s.value.device(), Category::Buffers);
    give_out(s.bucket, s.whole_value, &Parameter::value);
    gather(s);
  }
  void drop(Shards& s) {
    s.whole_value = {};
    for (Parameter* p : s.bucket.parameters) p->value = {};
  }

  // The unit that computes after this one; null at the end of a pass.
  Unit* neighbour(const Unit& unit, Pass pass) const {
    for (Stage* stage : chunks_) {
      const std::vector<Unit*>& units = stage->units();
      for (size_t i = 0; i < units.size(); ++i) {
        if (units[i] != &unit) continue;
        if (pass == Pass::Backward) return i > 0 ? units[i - 1] : nullptr;
        return i + 1 < units.size() ? units[i + 1] : nullptr;
      }
    }
    return nullptr;
  }
  std::vector<Shards*> shards_used_by(const Unit& unit) const {
    std::vector<Shards*> found;
    for (Parameter* p : unit.uses()) {
      Shards* s = shard_of_.at(p);
      if (std::find(found.begin(), found.end(), s) == found.end()) found.push_back(s);
    }
    return found;
  }
};

}  // namespace lockstep
