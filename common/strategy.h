#pragma once
// Who allocates what, and who updates what. The training loop, initialisation, the gradient norm,
// AdamW and checkpoints see the model only through Owned: the flat pieces that this rank updates.
// This file holds the interface and its one-rank case, in which a rank owns everything. 02 adds the
// reduction of gradients; 03 (ZeRO) lets each rank own a slice.

#include <vector>

#include "common/model.h"

namespace lockstep {

// `value` is what forward computes with (bf16, say), `master` what AdamW adds to (fp32): the same
// memory where both types are the same.
struct Owned {
  Parameter* parameter = nullptr;
  int64_t first = 0;  // of the parameter's local elements, this one and the next value.size()
  Tensor value, master, grad;
  bool counted = true;  // false on all but one of the ranks that own the same elements
};

class DataParallel {
 public:
  static constexpr int64_t kBucketMb = 25;  // 10^6 bytes, the default
  struct Settings {
    DType gradients = DType::F32;  // BF16 halves their memory and loses small addends
    int64_t bucket_bytes = kBucketMb * 1'000'000;  // of gradients that are summed at once
  };
  DataParallel(std::vector<Stage*> chunks, Settings settings)
      : chunks_(chunks), settings_(settings) {}
  virtual ~DataParallel() = default;

  // Gives every parameter its memory, and this rank what it owns. Each group of neighbours becomes
  // one tensor.
  virtual void allocate();
  const std::vector<Owned>& owned() const { return owned_; }
  // A step of so many micro-batches, one or more, each of which is one tape of every stage, begins.
  // Gradients of the step before no longer count.
  virtual void begin_step(int64_t micro_batches);
  // Afterwards owned().grad holds the sum over the whole job.
  virtual void finish() {}
  // A tape's backward has left the unit of a parameter that it did not use.
  virtual void unused(Parameter&) {}
  // owned()[i] has its new value (AdamW::step); publish: all have. Afterwards every copy of every
  // parameter has them too, at the latest when its unit is acquired.
  virtual void updated(size_t) {}
  virtual void publish() {}
  // Before and after a unit computes: its weights must be there. Where ZeRO gathers them.
  enum class Pass : uint8_t { Forward, Backward, Evaluation };
  virtual void acquire(Unit&, Pass) {}
  virtual void release(Unit&, Pass) {}

 protected:
  virtual void allocate_values();
  virtual void allocate_gradients();
  // Is this rank the one, of those that hold the same elements, that counts them? All of them know
  // the parameter by the same number, from 0 on.
  virtual bool counts(const Parameter&, size_t /*number*/) const { return true; }
  DType gradient_type(const Stage& stage) const;

  std::vector<Stage*> chunks_;
  Settings settings_;
  std::vector<Owned> owned_;
};

// Fresh memory for the master of a value: fp32 for 16 bits, the value itself where it is exact
// enough.
Tensor master_of(const Tensor& value);
// Fills masters and values: normal, one or zero as each parameter says. An element's value depends
// on the seed, the parameter's name and the element's place in the whole parameter, on no layout.
void initialise(const std::vector<Owned>&, uint64_t seed);
// Copies `local` [the parameter's local shape, F32, on the CPU] into what is owned of it.
void assign(const Owned&, const Tensor& local);

}  // namespace lockstep
