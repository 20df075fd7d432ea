// Around the model: first weights, samples, checkpoints and exports of ranks that share matrices,
// and sizes that they cannot share.

#include <cmath>

#include "common/evaluate.h"
#include "common/huggingface.h"
#include "common/plan.h"
#include "common/training.h"
#include "tests/checkpoints.h"
#include "tests/tensor_parallel_cases.h"

namespace lockstep {
namespace {

// First weights, put together, and how they were spread.
struct First {
  Tensors whole;
  std::vector<Tensors> local;  // of each rank
};
First first_weights(MeshShape shape, LayoutRig::Settings s) {
  First first;
  first.local.resize(size_t(shape.ranks()));
  Whole whole;
  run_threads(int(shape.ranks()), Device::CPU, {.time_limit = 10}, [&](Communicator& world) {
    ProcessMesh mesh(world, shape, s.config.kv_heads);
    LayoutRig rig(s, mesh);
    whole.add(rig.parallel->owned(), &Owned::master);
    for (const Owned& o : rig.parallel->owned())
      first.local[size_t(world.rank())][o.parameter->name] = doubles(o.master);
  });
  first.whole = whole.get();
  return first;
}

TEST(TensorParallelJob, Pitfall48_FirstWeightsDoNotDependOnTheLayout) {
  LayoutRig::Settings s = settings_of({1, 1, kVariants[1], Sync::Naive, {.kv_heads = 2}});
  s.seed = 42;
  s.config.init_std = 0.02;
  s.config.hidden = 64, s.config.ffn = 100;
  const First one = first_weights({}, s);
  auto std_of = [](const std::vector<double>& values) {
    double square = 0;
    for (double v : values) square += v * v;
    return std::sqrt(square / double(values.size()));
  };
  // The spread of the whole matrix, not that of a shard's fan.
  EXPECT_NEAR(std_of(one.whole.at("model.layers.0.mlp.gate_proj.weight")), 0.02, 0.001);
  EXPECT_NEAR(std_of(one.whole.at("model.layers.0.mlp.down_proj.weight")), s.config.residual_std(),
              0.05 * s.config.residual_std());
  for (MeshShape shape : {MeshShape{.tp = 2}, MeshShape{.tp = 4}, MeshShape{.tp = 8},
                          MeshShape{.dp = 2, .tp = 2}, MeshShape{.dp = 2, .tp = 4}})
    for (Sync sync : {Sync::Naive, Sync::Zero3}) {
      s.sync = sync;
      const First many = first_weights(shape, s);
      expect_bitwise(many.whole, one.whole);
      if (sync != Sync::Naive) continue;
      for (const char* name : {"model.layers.0.mlp.up_proj.weight", "lm_head.weight",
                               "model.layers.1.self_attn.o_proj.weight"}) {
        std::vector<double> a = many.local[0].at(name), b = many.local[1].at(name);
        size_t both = std::min(a.size(), b.size());
        a.resize(both), b.resize(both);
        EXPECT_NE(a, b) << name;  // as if ranks had drawn with the same seed
      }
    }
}

// --- Sizes -------------------------------------------------------------------------------------

TEST(TensorParallelJob, Pitfall45_HeadsThatCannotBeCutAreNamedWithWhatIsValid) {
  ModelConfig c = small_config();
  c.heads = c.kv_heads = 6;
  expect_refusal([&] { check_tensor_parallel(c, 8, 4, {}); }, {"6 heads", "TP4", "1, 2, 3, 6"});
  for (int ranks : {1, 2, 3, 6}) EXPECT_NO_THROW(check_tensor_parallel(c, 8, ranks, {})) << ranks;
  c.kv_heads = 3;
  expect_refusal([&] { check_tensor_parallel(c, 8, 2, {}); }, {"3 key/value heads", "TP2"});
  EXPECT_NO_THROW(check_tensor_parallel(c, 8, 6, {}));  // two ranks to each
  c.heads = 8, c.kv_heads = 2;
  for (int ranks : {1, 2, 4, 8}) EXPECT_NO_THROW(check_tensor_parallel(c, 8, ranks, {})) << ranks;
  c.vocab = 7;
  expect_refusal([&] { check_tensor_parallel(c, 8, 8, {}); }, {"TP8", "24", "7"});
}

TEST(TensorParallelJob, Pitfall46_SequenceThatTheRanksCannotShareIsRefused) {
  ModelConfig c = small_config();
  TensorParallel how{.sequence_parallel = true};
  expect_refusal([&] { check_tensor_parallel(c, 7, 2, how); }, {"7 tokens", "TP2"});
  EXPECT_NO_THROW(check_tensor_parallel(c, 8, 2, how));
  EXPECT_NO_THROW(check_tensor_parallel(c, 7, 2, {}));
  expect_refusal([&] { check_tensor_parallel(c, 8, 2, {.overlap = 2}); }, {"sequence parallelism"});
  expect_refusal([&] { check_tensor_parallel(c, 8, 2, {.gather_again = true}); },
                 {"sequence parallelism"});
  how.gather_again = true, how.overlap = 2;
  expect_refusal([&] { check_tensor_parallel(c, 8, 2, how); }, {"overlap", "gathering again"});
}

// --- A program's run ---------------------------------------------------------------------------

struct Job {
  Job() {
    std::string content;
    for (int i = 0; i < 8 * 200 + 1; ++i) content += char('a' + i * i % 23);
    data = folder.write("text.txt", content);
    options.config = TensorModel{.kv_heads = 2, .dropout = true}.config();
    options.config.vocab = 256;
    options.sequence = 8;
    options.micro_batch = 2;
    options.batch_tokens = 8 * 8;
    options.steps = 6;
    options.seed = 5;
    options.sample = 0;
    options.evaluation_batches = 1;
  }
  TemporaryFolder folder;
  std::filesystem::path data;
  Options options;
};

// The rig of one rank in such a run; the checkpoint, if any, is where it goes on from.
struct Rank {
  Rank(Communicator& world, Job& job, const TensorCase& c, const Corpus& corpus,
       const std::filesystem::path& checkpoint, bool resumes)
      : mesh(world, c.shape(), job.options.config.kv_heads), options(job.options) {
    options.checkpoint = checkpoint;
    options.resume = resumes;
    settle_ranks(options, mesh);
    LayoutRig::Settings s = settings_of(c);
    s.config = options.config;
    s.seed = resumes ? 99 : 5;
    rig = std::make_unique<LayoutRig>(s, mesh);
    feed = std::make_unique<Feed>(corpus, options, Cut{mesh.here().dp, c.dp});
    checkpoints = std::make_unique<Checkpoints>(options, corpus, *rig->optimizer, 6, &world);
    for (Unit* unit : rig->model->units()) {  // the rig has published first weights
      rig->parallel->acquire(*unit, DataParallel::Pass::Evaluation);
      rig->parallel->release(*unit, DataParallel::Pass::Evaluation);
    }
    done = checkpoints->resume();
    rig->parallel->publish();
  }
  void steps(int64_t last, std::map<int64_t, double>& losses) {
    for (int64_t step = done + 1; step <= last; ++step) {
      rig->step(feed->step(step - 1).micro_batches);
      if (mesh.world().rank() == 0) losses[step] = rig->state().loss;
    }
  }
  ProcessMesh mesh;
  Options options;
  std::unique_ptr<LayoutRig> rig;
  std::unique_ptr<Feed> feed;
  std::unique_ptr<Checkpoints> checkpoints;
  int64_t done = 0;
};

TEST(TensorParallelJob, CheckpointOfOneLayoutIsReadByAnother) {
  Job job;
  Corpus corpus({job.data, 8});
  for (Sync sync : {Sync::Bucketed, Sync::Zero1, Sync::Zero3}) {
    const std::filesystem::path run = job.folder / name_of(sync);
    std::map<int64_t, double> whole;
    Whole saved;
    TensorCase from{2, 2, kVariants[1], sync, {}};
    run_threads(4, Device::CPU, {.time_limit = 20}, [&](Communicator& world) {
      Rank rank(world, job, from, corpus, run, false);
      rank.steps(3, whole);
      rank.checkpoints->save(3);
      saved.add(rank.rig->parallel->owned(), &Owned::master);
      rank.done = 3;
      rank.steps(6, whole);
    });
    for (TensorCase to :
         {TensorCase{1, 1, kVariants[0], Sync::Naive, {}}, TensorCase{4, 1, kVariants[3], sync, {}},
          TensorCase{2, 2, kVariants[0], Sync::Zero1, {}}}) {
      SCOPED_TRACE(text(name_of(sync), " read by ", to.name()));
      std::map<int64_t, double> rest;
      Whole loaded;
      run_threads(int(to.shape().ranks()), Device::CPU, {.time_limit = 20},
                  [&](Communicator& world) {
                    Rank rank(world, job, to, corpus, run, true);
                    EXPECT_EQ(rank.done, 3);
                    loaded.add(rank.rig->parallel->owned(), &Owned::master);
                    rank.steps(6, rest);
                  });
      expect_bitwise(loaded.get(), saved.get());
      for (int64_t step : {4, 5, 6}) EXPECT_NEAR(rest[step], whole[step], 1e-5) << step;
    }
  }
}

// All ranks of a group read the same samples, other groups read others.
TEST(TensorParallelJob, Pitfall50_RanksOfOneReplicaReadTheSameSamples) {
  Job job;
  Corpus corpus({job.data, 8});
  struct Listening : Training {
    Listening(const Job& job, std::string& heard) : Training(job), heard(heard) {}
    void taken(int64_t, const StepBatch& batch) override {
      for (const MicroBatch& b : batch.micro_batches)
        for (const Tensor& t : {b.inputs, b.targets, b.rows}) heard += bytes_of(t);
    }
    std::string& heard;
  };
  std::string heard[2][2];  // [dp][tp]
  testing::internal::CaptureStdout();
  run_threads(4, Device::CPU, {.time_limit = 20}, [&](Communicator& world) {
    ProcessMesh mesh(world, {.dp = 2, .tp = 2}, 2);
    Options options = job.options;
    settle_ranks(options, mesh);
    Parts parts = plain_parts();
    parts.seed = options.seed;
    use_tensor_parallel(parts, mesh.tp(), {.sequence_parallel = true});
    Stage model(options.config, parts, options.compute, options.device);
    Naive parallel({&model}, mesh, {});
    parallel.allocate();
    Listening({mesh, options, corpus, {&model}, parallel}, heard[mesh.here().dp][mesh.here().tp])
        .run();
  });
  testing::internal::GetCapturedStdout();
  EXPECT_EQ(heard[0][0].size(), 6u * 4 * 8 * (4 + 4 + 8));  // 6 steps, 4 sequences of 8 a rank
  for (int dp : {0, 1}) EXPECT_EQ(heard[dp][0], heard[dp][1]);
  EXPECT_NE(heard[0][0], heard[1][0]);
}

// 21 rows of the table over 2, 4 or 8 ranks: the file has 21, whatever lies on each.
TEST(TensorParallelJob, Pitfall44_ExportedTableHasTheVocabularysRows) {
  TemporaryFolder dir;
  for (int ranks : {1, 2, 4, 8}) {
    TensorCase c{ranks, 1, kVariants[1], Sync::Naive, {.kv_heads = 2}};
    const std::filesystem::path out = dir / text("TP", ranks);
    run_threads(ranks, Device::CPU, {.time_limit = 10}, [&](Communicator& world) {
      ProcessMesh mesh(world, c.shape(), 2);
      LayoutRig rig(settings_of(c), mesh);
      Options options;
      options.config = rig.settings.config;
      options.export_to = out;
      export_weights(rig.parallel->owned(), options, &world);
    });
    WeightFiles files(out);
    for (const char* name : {"model.embed_tokens.weight", "lm_head.weight"})
      EXPECT_EQ(files.read(name).shape(), (Shape{21, 16})) << ranks;
    EXPECT_EQ(content_of(out / "model.safetensors"), content_of(dir / "TP1/model.safetensors"));
  }
}

// Every rank has some columns of the logits, and all draw the same token.
TEST(TensorParallelJob, RanksWriteTheSameTextAsOne) {
  const TensorModel model{.kv_heads = 2};
  auto write = [&](MeshShape shape, const LayoutRig::Settings& s) {
    std::vector<std::vector<int32_t>> texts{size_t(shape.ranks())};
    run_threads(int(shape.ranks()), Device::CPU, {.time_limit = 10}, [&](Communicator& world) {
      ProcessMesh mesh(world, shape, model.kv_heads);
      LayoutRig rig(s, mesh);
      Communicator* tp = mesh.tp().size() > 1 ? &mesh.tp() : nullptr;
      texts[size_t(world.rank())] = sample(*rig.model, {3, 1, 4}, 12, 0.8, 7, 11, tp);
    });
    for (const auto& t : texts) EXPECT_EQ(t, texts[0]);
    return texts[0];
  };
  const auto one = write({}, settings_of({1, 1, kVariants[0], Sync::Naive, model}));
  EXPECT_EQ(one.size(), 12u);
  for (const Variant& variant : kVariants)
    for (int ranks : {2, 4, 8})
      EXPECT_EQ(write({.tp = ranks}, settings_of({ranks, 1, variant, Sync::Naive, model})), one)
          << variant.name << ranks;
}

}  // namespace
}  // namespace lockstep
