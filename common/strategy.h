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
  struct Settings {
    DType gradients = DType::F32;  // BF16 halves their memory and loses small addends
  };
  DataParallel(std::vector<Stage*> chunks, Settings settings)
      : chunks_(chunks), settings_(settings) {}
  virtual ~DataParallel() = default;

  // Gives every parameter its memory. Each group of neighbours becomes one tensor.
  virtual void allocate();
  virtual std::vector<Owned> owned() const { return owned_; }
  virtual void zero_grad();
  // Afterwards owned().grad holds the sum over the whole job.
  virtual void finish() {}
  // Afterwards every copy of every parameter has the updated values.
  virtual void publish() {}
  // Before and after a unit computes, and a hint which one comes next: where ZeRO-3 gathers.
  virtual void acquire(Unit&) {}
  virtual void release(Unit&) {}
  virtual void prefetch(Unit*) {}

 protected:
  std::vector<Stage*> chunks_;
  Settings settings_;
  std::vector<Owned> owned_;
};

// Fills masters and values: normal, one or zero as each parameter says. An element's value depends
// on the seed, the parameter's name and the element's place in the whole parameter, on no layout.
void initialise(const std::vector<Owned>&, uint64_t seed);
// Copies `local` [the parameter's local shape, F32, on the CPU] into what is owned of it.
void assign(const Owned&, const Tensor& local);

}  // namespace lockstep
