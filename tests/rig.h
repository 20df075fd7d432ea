#pragma once
// A model with its optimizer, small enough to step through: what tests train.

#include <memory>

#include "common/optim.h"

namespace lockstep {

inline ModelConfig small_config() {
  ModelConfig c;
  c.layers = 2;
  c.hidden = 16;
  c.heads = 4;
  c.kv_heads = 2;
  c.head_dim = 4;
  c.ffn = 24;
  c.vocab = 20;
  c.init_std = 0.3;  // large enough that no gradient is tiny
  return c;
}

struct Rig {
  struct Settings {
    ModelConfig config = small_config();
    DType compute = DType::F32, gradients = DType::F32;
    Device device = Device::CPU;
    UpdateRule rule = {};
    uint64_t seed = 5;
  };
  explicit Rig(const Settings& s, const Parts& parts = plain_parts())
      : settings(s),
        model(s.config, parts, s.compute, s.device),
        parallel({&model}, {s.gradients}) {
    parallel.allocate();
    initialise(parallel.owned(), s.seed);
    optimizer = std::make_unique<AdamW>(parallel.owned(), s.rule, s.device);
    one = Tensor::empty({1}, sum_type(s.compute), s.device, Category::Buffers);
    on(one).fill(one, 1);
  }

  // Targets that count, as a number the device reads.
  Tensor valid(const std::vector<MicroBatch>& batches) const {
    int64_t count = 0;
    for (const MicroBatch& b : batches)
      for (int32_t t : b.targets.values<int32_t>()) count += t >= 0;
    return Tensor::from<int64_t>({count}, {1}, settings.device, Category::Buffers);
  }
  // Forward and backward of all micro-batches: gradients and the loss, no update.
  void gradients(const std::vector<MicroBatch>& batches) { gradients(batches, valid(batches)); }
  void gradients(const std::vector<MicroBatch>& batches, const Tensor& valid) {
    parallel.begin_step(int64_t(batches.size()));
    optimizer->begin_step(valid);
    for (const MicroBatch& b : batches) {
      Tape tape;
      Var loss = model.loss(tape, model.forward(tape, b), b, optimizer->scale());
      optimizer->add_loss(loss.value);
      tape.backward(loss, one);
    }
    parallel.finish();
  }
  void step(const std::vector<MicroBatch>& batches) { step(batches, valid(batches)); }
  void step(const std::vector<MicroBatch>& batches, const Tensor& valid) {
    gradients(batches, valid);
    optimizer->step();
    parallel.publish();
  }
  StepState state() const {
    std::vector<uint8_t> bytes = optimizer->state().values<uint8_t>();
    StepState s;
    std::copy(bytes.begin(), bytes.end(), reinterpret_cast<uint8_t*>(&s));
    return s;
  }

  Settings settings;
  Stage model;
  DataParallel parallel;
  std::unique_ptr<AdamW> optimizer;
  Tensor one;
};

// tokens [sequences * length] and their targets, in the order of the run from sample `first` on.
inline MicroBatch micro_batch(const std::vector<int32_t>& inputs,
                              const std::vector<int32_t>& targets, int64_t sequences,
                              Device device = Device::CPU, int64_t first = 0) {
  int64_t rows = int64_t(inputs.size()), length = rows / sequences;
  std::vector<int32_t> positions;
  std::vector<int64_t> ids;
  for (int64_t t = 0; t < rows; ++t) {
    positions.push_back(int32_t(t % length));
    ids.push_back(first * length + t);
  }
  MicroBatch b;
  b.inputs = Tensor::from(inputs, {rows}, device, Category::Buffers);
  b.targets = Tensor::from(targets, {rows}, device, Category::Buffers);
  b.positions = Tensor::from(positions, {rows}, device, Category::Buffers);
  b.rows = Tensor::from(ids, {rows}, device, Category::Buffers);
  b.sequences = sequences;
  b.length = length;
  return b;
}

// Random tokens; every `ignore_every`-th target is ignored (0: none).
inline MicroBatch random_batch(int64_t sequences, int64_t length, int64_t vocab, uint64_t seed,
                               int64_t ignore_every = 0, Device device = Device::CPU) {
  RandomStream draw(seed, "tokens");
  std::vector<int32_t> inputs, targets;
  for (int64_t t = 0; t < sequences * length; ++t) {
    inputs.push_back(int32_t(draw.at(uint64_t(2 * t)).x[0] % uint64_t(vocab)));
    targets.push_back(int32_t(draw.at(uint64_t(2 * t + 1)).x[0] % uint64_t(vocab)));
    if (ignore_every > 0 && t % ignore_every == 0) targets.back() = -100;
  }
  return micro_batch(inputs, targets, sequences, device, int64_t(seed) * sequences);
}

// Any floating-point tensor as doubles on the host.
inline std::vector<double> doubles(const Tensor& t) {
  Tensor wide = Tensor::empty(t.shape(), DType::F64, Device::CPU);
  Tensor host = t.to(Device::CPU);
  device::synchronize();
  on(wide).cast(wide, host);
  return wide.values<double>();
}

// |a - b| / |b| over a whole tensor.
inline double relative_error(const std::vector<double>& a, const std::vector<double>& b) {
  double error = 0, norm = 0;
  for (size_t i = 0; i < b.size(); ++i) {
    error += (a[i] - b[i]) * (a[i] - b[i]);
    norm += b[i] * b[i];
  }
  if (a.size() != b.size() || error != error) return INFINITY;
  return norm > 0 ? std::sqrt(error / norm) : std::sqrt(error);
}

}  // namespace lockstep
