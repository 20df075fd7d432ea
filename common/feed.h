#pragma once
// From the corpus to the device: the micro-batches of each step, uploaded without making the host
// or the GPU wait for each other.

#include <array>
#include <vector>

#include "common/data.h"
#include "common/device.h"
#include "common/ops.h"
#include "common/options.h"

namespace lockstep {

struct StepBatch {
  std::vector<MicroBatch> micro_batches;
  Tensor valid;        // [1] I64: targets of the global batch that are not ignored
  int64_t tokens = 0;  // rows in all
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
  Feed(const Corpus& corpus, const Options& options);

  // Steps of the run: --steps, or as many as --epochs needs, of which the last may be smaller.
  int64_t steps() const { return steps_; }
  StepBatch step(int64_t index);         // index counts from 0
  std::vector<MicroBatch> validation();  // the first windows of the validation split, in order

 private:
  StepBatch upload(const std::vector<Batch>& batches);

  const Corpus& corpus_;
  Sampler train_, in_order_;
  Upload upload_;
  int64_t length_, micro_batch_, batch_sequences_, samples_, steps_, validation_windows_;
};

}  // namespace lockstep
