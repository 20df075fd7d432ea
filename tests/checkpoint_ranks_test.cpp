// Checkpoints of several ranks: each writes what it owns, and any number of ranks goes on from it.

#include <gtest/gtest.h>

#include <atomic>

#include "common/feed.h"
#include "common/huggingface.h"
#include "common/plan.h"
#include "common/resume.h"
#include "common/shards.h"
#include "common/together.h"
#include "tests/checkpoints.h"
#include "tests/layout.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr Sync kStages[] = {Sync::Bucketed, Sync::Zero1, Sync::Zero2, Sync::Zero3};

// Two shards of tokens, which the windows of 8 do not end at: one window has tokens of both.
Corpus two_shards(const TemporaryFolder& dir) {
  fs::create_directories(dir / "data");
  for (int shard = 0; shard < 2; ++shard) {
    std::vector<int32_t> tokens;
    for (int i = 0; i < 92; ++i) tokens.push_back((i * i + 31 * shard) % 61);
    write_bin(dir / text("data/train_", shard, ".bin"), tokens, 61);
  }
  write_bin(dir / "data/val_0.bin", std::vector<int32_t>(30, 5), 61);
  return Corpus({dir / "data", 8});
}

// A run of ten steps of four micro-batches on each of two ranks, as a program would have it.
struct Training {
  Training(Communicator& world, const Corpus& corpus, Sync sync, const fs::path& checkpoint,
           uint64_t first_weights, bool resumes)
      : mesh(world, {.dp = world.size()}),
        options(make_options(checkpoint, resumes, world.size())),
        rig(make_settings(sync, first_weights, options), mesh),
        feed(corpus, options, {world.rank(), world.size()}),
        checkpoints(options, corpus, *rig.optimizer, 10, &world) {
    for (Unit* unit : rig.model->units()) {  // the rig has published first weights
      rig.parallel->acquire(*unit, DataParallel::Pass::Evaluation);
      rig.parallel->release(*unit, DataParallel::Pass::Evaluation);
    }
    done = checkpoints.resume();
    rig.parallel->publish();
  }
  static Options make_options(const fs::path& checkpoint, bool resumes, int dp) {
    Options o;
    o.config = small_config();
    o.config.vocab = 61;  // no size of anything can be divided by the ranks
    o.config.hidden = 17;
    o.config.ffn = 23;
    o.config.dropout = 0.2;
    o.sequence = 8;
    o.micro_batch = 12 / dp;  // another one for each number of ranks, and the same global batch
    o.batch_tokens = 8 * 48;
    o.steps = 10;
    o.seed = 3;
    o.checkpoint = checkpoint;
    o.resume = resumes;
    settle_batch(o, dp);
    return o;
  }
  static LayoutRig::Settings make_settings(Sync sync, uint64_t seed, const Options& o) {
    LayoutRig::Settings s;
    s.config = o.config;
    s.sync = sync;
    s.seed = seed;
    s.parallel.bucket_bytes = 3000;
    s.rule.schedule = {.peak = 0.01, .floor = 0.1, .warmup = 3, .total = 10};
    return s;
  }
  // What the step read, and all that it left on this rank.
  std::string step(int64_t number) {
    StepBatch batch = feed.step(number - 1);
    std::string seen;
    for (const MicroBatch& b : batch.micro_batches) seen += bytes_of(b.inputs) + bytes_of(b.rows);
    EXPECT_EQ(batch.micro_batches.size(), 4u);
    rig.step(batch.micro_batches);
    return seen + everything();
  }
  std::string everything() {
    std::string all = bytes_of(rig.optimizer->state());
    for (size_t i = 0; i < rig.optimizer->owned().size(); ++i) {
      const AdamW::Moments& moments = rig.optimizer->moments()[i];
      for (const Tensor& t : {rig.optimizer->owned()[i].master, moments.m, moments.v})
        all += bytes_of(t);
    }
    return all;
  }

  ProcessMesh mesh;
  Options options;
  LayoutRig rig;
  Feed feed;
  Checkpoints checkpoints;
  int64_t done = 0;
};

TEST(CheckpointRanks, Pitfall109_EveryStageGoesOnWithTheNextSamplesBitByBit) {
  TemporaryFolder dir;
  Corpus corpus = two_shards(dir);
  for (Sync sync : kStages) {
    const fs::path run = dir / name_of(sync);
    std::atomic<int64_t> parameters = 0;
    run_threads(2, Device::CPU, {}, [&](Communicator& world) {
      std::vector<std::string> whole;
      {
        Training training(world, corpus, sync, "", 1, false);
        for (int64_t step = 1; step <= 10; ++step) whole.push_back(training.step(step));
      }
      {
        Training first(world, corpus, sync, run, 1, false);
        for (int64_t step = 1; step <= 5; ++step)
          EXPECT_EQ(first.step(step), whole[size_t(step - 1)]) << name_of(sync) << step;
        first.checkpoints.save(5);
        parameters = first.options.config.parameters();
      }
      Training second(world, corpus, sync, run, 2, true);  // other weights, until it has loaded
      EXPECT_EQ(second.done, 5);
      for (int64_t step = 6; step <= 10; ++step)
        EXPECT_EQ(second.step(step), whole[size_t(step - 1)]) << name_of(sync) << step;
    });
    Manifest saved = read_manifest(run / "step_00000005");
    EXPECT_EQ(saved.ranks, 2);
    EXPECT_EQ(saved.next_sample(), 5 * 48);
    EXPECT_EQ(saved.files.size(), 2u);  // one from each rank
    int64_t bytes = 0;
    for (const SavedFile& file : saved.files) bytes += file.bytes;
    int64_t once = 3 * 4 * parameters;  // master, m and v
    EXPECT_GE(bytes, once) << name_of(sync);
    EXPECT_LT(bytes, 1.5 * double(once)) << name_of(sync);  // copies are saved by one rank
  }
}

struct Gathered {
  std::map<std::string, std::vector<double>> weights, m, v;
  bool operator==(const Gathered&) const = default;
};

// Saved by four ranks; parameters, m and v put together again from whatever loads them.
TEST(CheckpointRanks, Pitfall35_SavedByFourRanksLoadsOnOneTwoAndThree) {
  TemporaryFolder dir;
  Corpus corpus = two_shards(dir);
  auto gather = [&](int ranks, Sync sync, const fs::path& run, bool saves) {
    Whole weights, m, v;
    run_threads(ranks, Device::CPU, {}, [&](Communicator& world) {
      Training training(world, corpus, sync, run, saves ? 1 : 2, !saves);
      if (saves) {
        for (int64_t step = 1; step <= 3; ++step) training.step(step);
        training.checkpoints.save(3);
      } else {
        EXPECT_EQ(training.done, 3);
      }
      std::vector<Owned> owned = training.rig.optimizer->owned();
      weights.add(owned, &Owned::master);
      const auto& moments = training.rig.optimizer->moments();
      for (size_t i = 0; i < owned.size(); ++i) owned[i].master = moments[i].m;
      m.add(owned, &Owned::master);
      for (size_t i = 0; i < owned.size(); ++i) owned[i].master = moments[i].v;
      v.add(owned, &Owned::master);
    });
    return Gathered{weights.get(), m.get(), v.get()};
  };
  for (Sync sync : kStages) {
    const fs::path run = dir / name_of(sync);
    Gathered saved = gather(4, sync, run, true);
    int64_t size = 0;
    for (const auto& [name, values] : saved.weights) size += int64_t(values.size());
    EXPECT_NE(size % 2, 0) << "the shards would be even";
    EXPECT_NE(size % 3, 0);
    for (int ranks : {1, 2, 3})
      EXPECT_EQ(gather(ranks, sync, run, false), saved) << name_of(sync) << ranks;
  }
  // A stage reads what another one wrote.
  EXPECT_EQ(gather(3, Sync::Zero3, dir / "zero1", false),
            gather(1, Sync::Naive, dir / "zero1", false));
}

TEST(CheckpointRanks, SameRanksNeedTheSameMicroBatchOthersTheSameGlobalBatch) {
  TemporaryFolder dir;
  Corpus corpus = two_shards(dir);
  run_threads(2, Device::CPU, {}, [&](Communicator& world) {
    Training training(world, corpus, Sync::Zero1, dir / "run", 1, false);
    training.step(1);
    training.checkpoints.save(1);
  });
  Manifest saved = read_manifest(dir / "run/step_00000001");
  CheckpointSettings now = saved.settings;
  now.micro_batch = 3;
  expect_refusal([&] { require_same_run("run", saved, saved.config, now, 2); },
                 {"micro-batch 6", "3"});
  EXPECT_NO_THROW(require_same_run("run", saved, saved.config, now, 4));
  now.batch_tokens *= 2;
  expect_refusal([&] { require_same_run("run", saved, saved.config, now, 4); }, {"batch-tokens"});
}

// The disk of one rank is full: all end with that rank's sentence, nothing half is left, and what
// was saved before is still there.
TEST(CheckpointRanks, AFailureOnOneRankIsAFailureOfAll) {
  TemporaryFolder dir;
  Corpus corpus = two_shards(dir);
  std::atomic<int> told = 0;
  expect_refusal(
      [&] {
        run_threads(3, Device::CPU, {.time_limit = 20}, [&](Communicator& world) {
          Training training(world, corpus, Sync::Zero1, dir / "run", 1, false);
          training.step(1);
          training.checkpoints.save(1);
          CheckpointSettings settings =
              run_settings(training.options, corpus, training.rig.optimizer->rule());
          SaveOptions options;
          if (world.rank() == 1) options.after = [](const fs::path&) { fail("the disk is full"); };
          try {
            save_checkpoint(dir / "run", *training.rig.optimizer, training.options.config, settings,
                            2, options, &world);
          } catch (const Error& e) {
            told += std::string(e.what()) == "on rank 1: the disk is full";
            throw;
          }
        });
      },
      {"on rank 1: the disk is full"});
  EXPECT_EQ(told, 3);
  EXPECT_EQ(names_in(dir / "run"), (std::vector<std::string>{"step_00000001"}));
  EXPECT_EQ(latest_checkpoint(dir / "run"), dir / "run/step_00000001");
}

TEST(CheckpointRanks, ADamagedFileIsRefusedOnAllRanks) {
  TemporaryFolder dir;
  Corpus corpus = two_shards(dir);
  run_threads(2, Device::CPU, {}, [&](Communicator& world) {
    Training training(world, corpus, Sync::Zero3, dir / "run", 1, false);
    training.step(1);
    training.checkpoints.save(1);
  });
  fs::resize_file(dir / "run/step_00000001/rank_1_of_2-00001.safetensors", 100);
  ::testing::internal::CaptureStderr();
  expect_refusal(
      [&] {
        run_threads(2, Device::CPU, {.time_limit = 20}, [&](Communicator& world) {
          Training(world, corpus, Sync::Zero3, dir / "run", 2, true);
        });
      },
      {"on rank 0", "holds no complete checkpoint", "1 damaged"});
  EXPECT_NE(::testing::internal::GetCapturedStderr().find("has 100 bytes"), std::string::npos);
}

// All ranks hold a part; the first one writes all of it.
TEST(CheckpointRanks, ExportHasTheWholeModel) {
  TemporaryFolder dir;
  Corpus corpus = two_shards(dir);
  for (Sync sync : kStages) {
    const fs::path out = dir / text("hf_", name_of(sync));
    Whole weights;
    run_threads(3, Device::CPU, {}, [&](Communicator& world) {
      Training training(world, corpus, sync, "", 1, false);
      training.step(1);
      training.options.export_to = out;
      export_weights(training.rig.parallel->owned(), training.options, &world);
      weights.add(training.rig.optimizer->owned(), &Owned::master);
    });
    WeightFiles files(out);
    auto whole = weights.get();
    EXPECT_EQ(files.names().size(), whole.size());
    for (const auto& [name, values] : whole) EXPECT_EQ(doubles(files.read(name)), values) << name;
  }
}

TEST(CheckpointRanks, TextsReachAllRanksInOrder) {
  run_threads(3, Device::CPU, {}, [](Communicator& world) {
    const std::string mine(size_t(world.rank() * 5), char('a' + world.rank()));
    EXPECT_EQ(world.gather_texts(mine), (std::vector<std::string>{"", "bbbbb", "cccccccccc"}));
    EXPECT_EQ(world.gather_texts(""), (std::vector<std::string>(3)));
    expect_refusal(
        [&] {
          together(&world, [&]() -> std::string {
            require(world.rank() == 0, "broken");
            return "fine";
          });
        },
        {"on rank 1: broken"});
  });
}

}  // namespace
}  // namespace lockstep
