#pragma once
// What a trained model is asked: how well does it predict text it never saw, and what does it
// write?

#include <string>
#include <vector>

#include "common/comm.h"
#include "common/model.h"

namespace lockstep {

// Sums and counts: a mean of means would be wrong where counts differ.
class MeanLoss {
 public:
  void add(const Tensor& loss);         // [1], summed over its tokens; waits for the device
  void count(const MicroBatch& batch);  // its valid targets
  double over(Communicator* ranks, Device device) const;  // of all of them; null: of this one

 private:
  double sum_ = 0, valid_ = 0;
};

// Mean negative log-likelihood, in nats per valid target, over all micro-batches: those of all
// ranks of `data`, if there are several. Every rank gets the same number.
double evaluate(Stage& model, const std::vector<MicroBatch>& batches, Communicator* data = nullptr);

// A micro-batch of one sequence without targets; its tokens stand at positions first, first + 1 ...
MicroBatch sequence(const std::vector<int32_t>& tokens, Device device, int64_t first = 0);

// The logits of the token that comes after these. Waits for the device.
// tp: ranks that have a part of the vocabulary each; all of them call it and get all of it.
std::vector<float> next_logits(Stage& model, std::vector<int32_t> tokens, int64_t first = 0,
                               Communicator* tp = nullptr);

// `count` tokens after `prompt`, each drawn from softmax(logits / temperature); temperature 0 takes
// the likeliest. Every token runs the whole forward pass again over the last `window` tokens.
std::vector<int32_t> sample(Stage& model, std::vector<int32_t> prompt, int64_t count,
                            double temperature, int64_t window, uint64_t seed,
                            Communicator* tp = nullptr);

// The index that a uniform number u in [0, 1) picks from softmax(logits / temperature).
int32_t pick(const std::vector<float>& logits, double temperature, double u);

// Byte tokens as text a terminal can show: bytes that are no printable character become '?'.
std::string printable(const std::vector<int32_t>& bytes);

}  // namespace lockstep
