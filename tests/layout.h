#pragma once
// One model in any layout: what parallel runs compute, put together again and compared per tensor
// with one rank. Ranks are threads.

#include <map>
#include <mutex>

#include "03_zero/use_zero.h"
#include "03_zero/zero3.h"
#include "02_data_parallel/bucketed.h"
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
    case Sync::Bucketed: return std::make_unique<Bucketed>(chunks, mesh, settings);
    case Sync::Zero1: return std::make_unique<Zero1>(chunks, mesh, settings);
    case Sync::Zero2: return std::make_unique<Zero2>(chunks, mesh, settings);
    case Sync::Zero3: return std::make_unique<Zero3>(chunks, mesh, settings);
  }
  fail("unknown");
}

// A rank's part of a job.
struct LayoutRig {
  struct Settings {
    ModelConfig config = small_config();
    DType compute = DType::F32;
    DataParallel::Settings parallel = {};
    Sync sync = Sync::Naive;
    Device device = Device::CPU;
    UpdateRule rule = {};
    uint64_t seed = 5;
    std::optional<TensorParallel> tp_how = {};
    std::function<void(Parts&)> more = {};  // recomputation, …
  };
  LayoutRig(const Settings& s, ProcessMesh& process_mesh) : settings(s), mesh(process_mesh) {
    Parts parts = plain_parts();
    if (s.tp_how) use_tensor_parallel(parts, mesh.tp(), *s.tp_how);
    if (s.more) s.more(parts);
    use_zero(parts, parallel);
    model = std::make_unique<Stage>(s.config, parts, s.compute, s.device);
    parallel = make_parallel(s.sync, {model.get()}, mesh, s.parallel);
    parallel->allocate();
    initialise(parallel->owned(), s.seed);
    parallel->publish();
    optimizer =
        std::make_unique<AdamW>(parallel->owned(), s.rule, s.device, &mesh.world());
    one = Tensor::empty({1}, sum_type(s.compute), s.device, Category::Buffers);
    on(one).fill(one, 1);
  }

  // `mine`: this rank's micro-batches.
  void gradients(const std::vector<MicroBatch>& mine) {
    int64_t count = 0;
    for (const MicroBatch& b : mine)
      for (int32_t t : b.targets.values<int32_t>()) count += t >= 0;
    Tensor valid = Tensor::from<int64_t>({count}, {1}, settings.device, Category::Buffers);
    mesh.data().all_reduce(valid).wait();
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
  void step(const std::vector<MicroBatch>& mine) {
    gradients(mine);
    optimizer->step([this](size_t i) { parallel->updated(i); });
    parallel->publish();
  }
  StepState state() const { return on_host(optimizer->state()); }

  Settings settings;
  ProcessMesh& mesh;
  std::unique_ptr<DataParallel> parallel;  // before the model, whose units ask for it
  std::unique_ptr<Stage> model;
  std::unique_ptr<AdamW> optimizer;
  Tensor one;
};

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

}  // namespace lockstep
