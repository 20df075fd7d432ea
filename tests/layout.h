#pragma once
// One model in any layout: what parallel runs compute, put together again and compared per tensor
// with one rank. Ranks are threads.

#include <gtest/gtest.h>

#include <cstring>
#include <map>
#include <mutex>

#include "03_zero/make_zero.h"
#include "03_zero/use_zero.h"
#include "04_tensor_parallel/use_tensor_parallel.h"
#include "common/checkpoint_reader.h"
#include "common/ranks.h"
#include "tests/rig.h"

namespace lockstep {

enum class Sync : uint8_t { Naive, Overlapped, Bucketed, Zero1, Zero2, Zero3 };
inline constexpr Sync kAllSyncs[] = {Sync::Naive, Sync::Overlapped, Sync::Bucketed,
                                     Sync::Zero1, Sync::Zero2,      Sync::Zero3};
inline const char* name_of(Sync s) {
  constexpr const char* kNames[] = {"naive", "overlapped", "bucketed", "zero1", "zero2", "zero3"};
  return kNames[size_t(s)];
}

inline std::unique_ptr<DataParallel> make_parallel(Sync sync, std::vector<Stage*> chunks,
                                                   ProcessMesh& mesh,
                                                   DataParallel::Settings settings) {
  switch (sync) {
    case Sync::Naive: return std::make_unique<Naive>(chunks, mesh, settings);
    case Sync::Overlapped: return std::make_unique<Overlapped>(chunks, mesh, settings);
    default: return make_zero(int(sync) - int(Sync::Bucketed), chunks, mesh, settings);
  }
}

// One global batch, the same whatever the layout: 24 sequences, of so many tokens where the model
// leaves the choice.
inline constexpr int64_t kSequences = 24, kLength = 5;

// A rank's part of a job, but for the model: whole (LayoutRig) or in stages (PipelineRig).
struct RankRig {
  struct Settings {
    ModelConfig config = small_config();
    DType compute = DType::F32;
    DataParallel::Settings parallel = {};
    Sync sync = Sync::Naive;
    Device device = Device::CPU;
    UpdateRule rule = {};
    uint64_t seed = 5;
    std::optional<TensorParallel> tensor_parallel = {};
    int64_t length = kLength;                                     // of a sequence
    std::function<void(Parts&)> more = {};                        // recomputation, …
    std::function<void(const std::vector<Owned>&)> weights = {};  // instead of random ones
    // Instead of `sync`: a strategy of the test's own.
    std::function<std::unique_ptr<DataParallel>(std::vector<Stage*>, ProcessMesh&,
                                                DataParallel::Settings)>
        make = {};
  };
  RankRig(const Settings& s, ProcessMesh& process_mesh) : settings(s), mesh(process_mesh) {}

  // When `parallel` is made: memory, first weights, optimizer.
  void start() {
    parallel->allocate();
    if (settings.weights) {
      settings.weights(parallel->owned());
    } else {
      initialise(parallel->owned(), settings.seed);
    }
    parallel->publish();
    optimizer =
        std::make_unique<AdamW>(parallel->owned(), settings.rule, settings.device, &mesh.world());
    one = Tensor::empty({1}, sum_type(settings.compute), settings.device, Category::Buffers);
    on(one).fill(one, 1);
  }
  // Of all ranks together.
  Tensor valid_targets(const std::vector<MicroBatch>& mine) {
    int64_t count = 0;
    for (const MicroBatch& b : mine)
      for (int32_t t : b.targets.values<int32_t>()) count += t >= 0;
    Tensor valid = Tensor::from<int64_t>({count}, {1}, settings.device, Category::Buffers);
    mesh.data().all_reduce(valid).wait();
    return valid;
  }
  void phase(const char* name) { mesh.world().ledger().set_phase(name); }
  StepState state() const { return on_host(optimizer->state()); }

  Settings settings;
  ProcessMesh& mesh;
  std::unique_ptr<DataParallel> parallel;  // before the model, whose units ask for it
  std::unique_ptr<AdamW> optimizer;
  Tensor one;
};

struct LayoutRig : RankRig {
  LayoutRig(const Settings& s, ProcessMesh& process_mesh) : RankRig(s, process_mesh) {
    Parts parts = plain_parts();
    if (s.tensor_parallel) use_tensor_parallel(parts, mesh.tp(), *s.tensor_parallel);
    if (s.more) s.more(parts);
    use_zero(parts, parallel);
    model = std::make_unique<Stage>(s.config, parts, s.compute, s.device);
    parallel = s.make ? s.make({model.get()}, mesh, s.parallel)
                      : make_parallel(s.sync, {model.get()}, mesh, s.parallel);
    start();
  }

  // `mine`: this rank's micro-batches. The ledger's phases: count, backward, optimizer, publish.
  void gradients(const std::vector<MicroBatch>& mine) {
    phase("count");
    Tensor valid = valid_targets(mine);
    phase("backward");
    parallel->begin_step(int64_t(mine.size()));
    optimizer->begin_step(valid);
    for (const MicroBatch& b : mine) {
      Tape tape;
      Var loss = model->loss(tape, model->forward(tape, b), b, optimizer->scale());
      if (mesh.here().tp == 0) optimizer->add_loss(loss.value);
      tape.backward(loss, one);
    }
    parallel->finish();
  }
  void update() {
    phase("optimizer");
    optimizer->step([this](size_t i) { parallel->updated(i); });
    phase("publish");
    parallel->publish();
  }
  void step(const std::vector<MicroBatch>& mine) {
    gradients(mine);
    update();
  }

  std::unique_ptr<Stage> model;
};

// Some targets are ignored, and all of sequences 3 to 5. The batch is dealt out as accumulation x
// ranks micro-batches: each is a run of neighbouring sequences, and a rank has every ranks-th of
// them.
inline std::vector<MicroBatch> dealt(const ModelConfig& config, Cut rank, int accumulation,
                                     int step = 0, Device device = Device::CPU,
                                     int64_t length = kLength) {
  RandomStream draw(uint64_t(step), "tokens");
  auto token = [&](int64_t at) { return int32_t(draw.at(uint64_t(at)).x[0] % config.vocab); };
  std::vector<MicroBatch> mine;
  for (int i = 0; i < accumulation; ++i) {
    Range part = share(kSequences, {i * rank.size + rank.rank, accumulation * rank.size});
    std::vector<int32_t> inputs, targets;
    for (int64_t n = part.first; n < part.first + part.count; ++n)
      for (int64_t t = 0; t < length; ++t) {
        bool ignored = (n >= 3 && n <= 5) || (n + 2 * t) % 7 == 0;
        inputs.push_back(token(2 * (n * length + t)));
        targets.push_back(ignored ? -100 : token(2 * (n * length + t) + 1));
      }
    mine.push_back(micro_batch(inputs, targets, part.count, device, part.first));
  }
  return mine;
}

// Pieces of parameters from all ranks, as whole tensors.
class Whole {
 public:
  void add(const std::vector<Owned>& owned, Tensor Owned::*which) {
    for (const Owned& o : owned) {
      if (!o.counted) continue;
      std::vector<double> values = doubles(o.*which);
      std::lock_guard lock(mutex_);
      auto& [whole, times] = tensors_[o.parameter->name];
      whole.resize(size_t(elements(o.parameter->shard.whole)));
      times.resize(whole.size());
      for (size_t i = 0; i < values.size(); ++i) {
        size_t at = size_t(o.parameter->shard.whole_index(o.first + int64_t(i)));
        whole[at] = values[i];
        ++times[at];
      }
    }
  }
  // name -> elements. Throws unless every element came from exactly one rank.
  std::map<std::string, std::vector<double>> get() const {
    std::map<std::string, std::vector<double>> out;
    for (const auto& [name, tensor] : tensors_) {
      for (size_t i = 0; i < tensor.second.size(); ++i)
        require(tensor.second[i] == 1, "element ", i, " of ", name, " is counted by ",
                tensor.second[i], " ranks");
      out[name] = tensor.first;
    }
    return out;
  }

 private:
  std::mutex mutex_;
  std::map<std::string, std::pair<std::vector<double>, std::vector<int>>> tensors_;
};

// name -> elements
using Tensors = std::map<std::string, std::vector<double>>;

// A run of some steps on the global batch, put together.
struct Trained {
  Tensors start;      // first weights
  Tensors gradients;  // of the first step
  Tensors weights;    // after the last one
  std::vector<double> losses, norms;
  std::vector<std::vector<LedgerEntry>> ledgers;  // of each rank
};
// One rank's steps. Its pieces go to those of the others; rank 0 keeps the numbers.
template <class Rig>
void run_steps(Rig& rig, int steps,
               const std::function<std::vector<MicroBatch>(int step)>& batch_of, Trained& result,
               Whole& gradients, Whole& weights, const std::function<void(int step)>& after = {}) {
  for (int step = 0; step < steps; ++step) {
    rig.gradients(batch_of(step));
    if (step == 0) gradients.add(rig.parallel->owned(), &Owned::grad);
    rig.update();
    if (after) after(step);
    if (rig.mesh.world().rank() > 0) continue;
    result.losses.push_back(rig.state().loss);
    result.norms.push_back(rig.state().gradient_norm);
  }
  weights.add(rig.parallel->owned(), &Owned::master);
}
inline Trained train(MeshShape shape, const LayoutRig::Settings& settings, int accumulation,
                     int steps, Communicator::Options options = {}) {
  Trained result;
  result.ledgers.resize(size_t(shape.ranks()));
  Whole start, gradients, weights;
  run_threads(int(shape.ranks()), settings.device, options, [&](Communicator& world) {
    ProcessMesh mesh(world, shape, settings.config.kv_heads);
    LayoutRig rig(settings, mesh);
    start.add(rig.parallel->owned(), &Owned::master);
    auto batch_of = [&](int step) {
      world.ledger().set_step(step);
      return dealt(settings.config, {mesh.here().dp, shape.dp}, accumulation, step, settings.device,
                   settings.length);
    };
    run_steps(rig, steps, batch_of, result, gradients, weights);
    result.ledgers[size_t(world.rank())] = world.ledger().entries();
  });
  result.start = start.get();
  result.gradients = gradients.get();
  result.weights = weights.get();
  return result;
}
inline Trained train(int ranks, const LayoutRig::Settings& settings, int accumulation, int steps,
                     Communicator::Options options = {}) {
  return train(MeshShape{.dp = ranks}, settings, accumulation, steps, options);
}

// All relative.
struct Tolerance {
  double loss = 1e-6, gradient = 1e-5, weight = 1e-6;
};
inline void expect_same(const Trained& run, const Trained& want, Tolerance t = {}) {
  ASSERT_EQ(run.gradients.size(), want.gradients.size());
  for (size_t s = 0; s < want.losses.size(); ++s) {
    EXPECT_NEAR(run.losses[s], want.losses[s], t.loss * want.losses[s]) << "step " << s;
    EXPECT_NEAR(run.norms[s], want.norms[s], t.gradient * want.norms[s]) << "step " << s;
  }
  for (const auto& [name, g] : want.gradients)
    EXPECT_LE(relative_error(run.gradients.at(name), g), t.gradient) << "gradient of " << name;
  for (const auto& [name, w] : want.weights)
    EXPECT_LE(relative_error(run.weights.at(name), w), t.weight) << name;
}
// memcmp: also tells 0 from -0.
inline bool bitwise(const std::vector<double>& a, const std::vector<double>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(double)) == 0;
}
inline void expect_bitwise(const Tensors& a, const Tensors& b) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [name, values] : b) EXPECT_TRUE(bitwise(a.at(name), values)) << name;
}

}  // namespace lockstep
