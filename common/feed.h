#pragma once
// From the corpus to the device: the micro-batches of each step, uploaded without making the host
// or the GPU wait for each other.
//
// Ranks that share a global batch deal its samples out in turns of a micro-batch. A step of ten
// samples on two ranks, micro-batches of two:
//
//   micro-batch     0     1     2
//   rank 0         0 1   4 5   8 9
//   rank 1         2 3   6 7    .        nothing is left: a window whose targets are all ignored
//
// So every rank runs as many micro-batches as the others, and takes part in every collective; the
// pad adds nothing to loss, gradient or count, and no sample is trained twice. Which samples a step
// has does not depend on the number of ranks.

#include <array>
#include <vector>

#include "common/data.h"
#include "common/device.h"
#include "common/ops.h"
#include "common/options.h"

namespace lockstep {

struct StepBatch {
  std::vector<MicroBatch> micro_batches;
  Tensor valid;        // [1] I64: targets that are not ignored, of this rank: to be summed over all
  int64_t tokens = 0;  // of the global batch
};

// Copies host tensors to the device through pinned memory (two slots, so that filling one does not
// wait for the copy out of the other). On the CPU it hands them through.
class Upload {
 public:
  explicit Upload(Device device) : device_(device) {}
  ~Upload();
  Upload(const Upload&) = delete;
  std::vector<Tensor> operator()(const std::vector<Tensor>& host);

 private:
  struct Slot {
    std::byte* memory = nullptr;
    size_t bytes = 0;
    device::Event copied;
  };
  Device device_;
  std::array<Slot, 2> slots_;
  int64_t uploads_ = 0;
};

class Feed {
 public:
  // data: which of the ranks that share the global batch this is.
  Feed(const Corpus& corpus, const Options& options, Cut data = {});

  // Steps of the run: --steps, or as many as --epochs needs, of which the last may be smaller.
  int64_t steps() const { return steps_; }
  StepBatch step(int64_t index);  // index counts from 0
  // The first windows of the validation split, in order: this rank's part of them, in as many
  // micro-batches as every rank has.
  std::vector<MicroBatch> validation();

 private:
  Batch part(Split split, const Sampler& sampler, int64_t first, int64_t end) const;
  StepBatch upload(const std::vector<Batch>& batches);

  const Corpus& corpus_;
  Sampler train_, in_order_;
  Upload upload_;
  Cut data_;
  int64_t length_, micro_batch_, batch_sequences_, samples_, steps_, validation_windows_;
};

}  // namespace lockstep
