#pragma once
// A pipeline as tests run it: any schedule on ranks that are threads, with its gradients put
// together again. And the same batch without a pipeline, which it is compared with.

#include "06_pipeline_parallel/pipeline.h"
#include "06_pipeline_parallel/schedules.h"
#include "06_pipeline_parallel/split_layers.h"
#include "tests/layout.h"

namespace lockstep {

// Enough layers for two stages on each of eight ranks.
inline ModelConfig deep_config() {
  ModelConfig c = small_config();
  c.layers = 16;
  c.hidden = 8;
  c.heads = 2;
  c.kv_heads = 1;
  c.head_dim = 4;
  c.ffn = 12;
  return c;
}

struct PipelineCase {
  std::string schedule = "1f1b";
  int pp = 2, micro_batches = 4, dp = 1;
  Sync sync = Sync::Bucketed;  // without ZeRO
  int chunks = 0, group = 0;
  EndCosts ends = {};

  int ranks() const { return dp * pp; }
  PlacedSchedule make(int m) const { return make_schedule(schedule, pp, chunks, m, group); }
  bool allowed() const {
    if (schedule == "dualpipe-v") return micro_batches >= 2 * pp;
    return schedule != "interleaved" || micro_batches % pp == 0;
  }
  std::string name() const {
    return text(schedule, " PP", pp, " DP", dp, " ", micro_batches, " micro-batches, ",
                name_of(sync));
  }
};

// A rank's part of it.
struct PipelineRig : RankRig {
  PipelineRig(const Settings& s, const PipelineCase& c, ProcessMesh& process_mesh)
      : RankRig(s, process_mesh) {
    Options options;
    options.config = s.config, options.compute = s.compute, options.device = s.device;
    Placement placement = c.make(c.micro_batches).placement;
    Parts parts = plain_parts();
    if (s.more) s.more(parts);
    use_zero(parts, parallel);
    stages = make_stages(options, parts, placement, mesh.pp().rank(),
                         split_layers(s.config.layers, placement, c.ends));
    for (auto& stage : stages) chunks.push_back(stage.get());
    parallel = make_parallel(c.sync, chunks, mesh, s.parallel);
    start();
    auto schedule = [c](int m) { return c.make(m).schedule; };
    pipeline.emplace(chunks, mesh.pp(), Pipeline::Settings{placement, schedule});
  }

  // calls: the micro-batches go through the pipeline in so many runs.
  void gradients(const std::vector<MicroBatch>& mine, const Pipeline::Observer& observer = {},
                 size_t calls = 1) {
    Tensor valid = valid_targets(mine);
    phase("pipeline");
    parallel->begin_step(int64_t(mine.size()));
    optimizer->begin_step(valid);
    for (size_t call = 0; call < calls; ++call) {
      Range part = share(int64_t(mine.size()), {int(call), int(calls)});
      std::vector<MicroBatch> some(mine.begin() + part.first,
                                   mine.begin() + part.first + part.count);
      pipeline->run(
          some, optimizer->scale(), one, [this](const Tensor& loss) { optimizer->add_loss(loss); },
          observer);
    }
    phase("sum");
    parallel->finish();
  }
  void update() {
    optimizer->step([this](size_t i) { parallel->updated(i); });
    parallel->publish();
  }

  std::vector<std::unique_ptr<Stage>> stages;
  std::vector<Stage*> chunks;
  std::optional<Pipeline> pipeline;
};

// One global batch of 64 sequences of 3 tokens, of which some targets are ignored. Micro-batches
// are uneven where their number does not divide it.
inline std::vector<MicroBatch> flowing(const ModelConfig& config, Cut rank, int micro_batches,
                                       int step = 0, Device device = Device::CPU) {
  constexpr int64_t kAll = 64, kTokens = 3;
  RandomStream draw(uint64_t(step), "tokens");
  auto token = [&](int64_t at) { return int32_t(draw.at(uint64_t(at)).x[0] % config.vocab); };
  std::vector<MicroBatch> mine;
  for (int i = 0; i < micro_batches; ++i) {
    Range part = share(kAll, {i * rank.size + rank.rank, micro_batches * rank.size});
    std::vector<int32_t> inputs, targets;
    for (int64_t at = part.first * kTokens; at < (part.first + part.count) * kTokens; ++at) {
      inputs.push_back(token(2 * at));
      targets.push_back(at % 7 == 0 ? -100 : token(2 * at + 1));
    }
    mine.push_back(micro_batch(inputs, targets, part.count, device, part.first));
  }
  return mine;
}

// `run` is one rank's part; every rank's owned pieces come together in what is returned. Ledgers
// hold the first step only.
inline Trained train_pipeline(const PipelineCase& c, const LayoutRig::Settings& s, int steps = 1,
                              Communicator::Options options = {.time_limit = 20}) {
  Trained result;
  result.ledgers.resize(size_t(c.ranks()));
  Whole gradients, weights;
  run_threads(c.ranks(), s.device, options, [&](Communicator& world) {
    ProcessMesh mesh(world, {.dp = c.dp, .pp = c.pp});
    PipelineRig rig(s, c, mesh);
    world.ledger().clear();
    auto batch_of = [&](int step) {
      return flowing(s.config, {mesh.here().dp, c.dp}, c.micro_batches, step, s.device);
    };
    auto keep_ledger = [&](int step) {
      if (step == 0) result.ledgers[size_t(world.rank())] = world.ledger().entries();
    };
    run_steps(rig, steps, batch_of, result, gradients, weights, keep_ledger);
  });
  result.gradients = gradients.get();
  result.weights = weights.get();
  return result;
}

// The same batch in the same micro-batches, on ranks that hold the whole model.
inline Trained train_plain(int dp, int micro_batches, LayoutRig::Settings s, int steps = 1) {
  Trained result;
  Whole gradients, weights;
  s.sync = Sync::Bucketed;
  run_threads(dp, s.device, {}, [&](Communicator& world) {
    ProcessMesh mesh(world, {.dp = dp});
    LayoutRig rig(s, mesh);
    auto batch_of = [&](int step) {
      return flowing(s.config, {world.rank(), dp}, micro_batches, step, s.device);
    };
    run_steps(rig, steps, batch_of, result, gradients, weights);
  });
  result.gradients = gradients.get();
  result.weights = weights.get();
  return result;
}

inline LayoutRig::Settings pipeline_settings(bool tied = false) {
  LayoutRig::Settings s;
  s.config = deep_config();
  s.config.tied = tied;
  s.parallel.bucket_bytes = 3000;  // several buckets
  return s;
}

}  // namespace lockstep
