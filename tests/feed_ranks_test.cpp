// Which samples each rank of a job takes, how they come to one loss, and from which weights.

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <set>

#include "common/checks.h"
#include "common/evaluate.h"
#include "common/feed.h"
#include "common/huggingface.h"
#include "common/plan.h"
#include "common/report.h"
#include "tests/layout.h"
#include "tests/temporary.h"

namespace lockstep {
namespace {

// Training windows of `length` bytes, as many as asked for in each part of the text.
Corpus corpus_of(const TemporaryFolder& dir, int64_t train, int64_t validation, int64_t length) {
  std::string content;
  int64_t tokens = (train + validation) * length + 2;
  for (int64_t i = 0; i < tokens; ++i) content += char('a' + i * i % 23);
  CorpusOptions where{dir.write(text(train, "_", validation, ".txt"), content), length,
                      double(validation * length + 1) / double(tokens)};
  return Corpus(where);
}

Options options_of(int64_t length, int64_t micro_batch, int64_t accumulation, int64_t dp) {
  Options o;
  o.sequence = length;
  o.micro_batch = micro_batch;
  o.batch_tokens = length * micro_batch * accumulation * dp;
  o.epochs = 1;
  settle_batch(o, dp);
  return o;
}

// The samples that a micro-batch trains on, by their numbers in the run: pads have none.
std::vector<int64_t> samples_of(const MicroBatch& b) {
  std::vector<int64_t> out, rows = b.rows.values<int64_t>();
  std::vector<int32_t> targets = b.targets.values<int32_t>();
  for (int64_t s = 0; s < b.sequences; ++s)
    if (targets[size_t(s * b.length)] >= 0) out.push_back(rows[size_t(s * b.length)] / b.length);
  return out;
}

// ---- How large a step is

// "4M tokens, sequences of 4k": 2^22 / 2^12 samples.
TEST(FeedRanks, D5_GlobalBatchIsMicroBatchTimesAccumulationTimesRanks) {
  constexpr int64_t kTokens = 1 << 22, kSequence = 4096;
  Options o;
  o.sequence = kSequence;
  o.micro_batch = 2;
  o.batch_tokens = kTokens;
  EXPECT_EQ(o.batch_sequences(), 1024);
  settle_batch(o, 128);
  EXPECT_EQ(o.accumulation(), 4);
  settle_batch(o, 512);
  EXPECT_EQ(o.accumulation(), 1);
  settle_batch(o, 1);
  EXPECT_EQ(o.accumulation(), 512);
  Options least;  // one micro-batch on each rank
  least.sequence = kSequence;
  least.micro_batch = 2;
  settle_batch(least, 128);
  EXPECT_EQ(least.batch_tokens, 2 * kSequence * 128);
}

TEST(FeedRanks, D6_ARatioBelowOneIsReportedNotRounded) {
  expect_refusal([] { accumulation_for(1 << 22, 2, 4096, 1024); },
                 {"4194304 tokens", "0.5 micro-batches", "1024 ranks", "8388608 tokens at once",
                  "1024 x 2 x 4096", "--batch-tokens", "--micro-batch"});
  expect_refusal([] { accumulation_for(1 << 22, 2, 4096, 384); }, {"1.33333 micro-batches", "384"});
  expect_refusal([] { accumulation_for(4096, 2, 4096); }, {"4096 tokens", "8192"});
}

// ---- Which samples

// 5 samples, two ranks, two at once; 10 samples, three ranks, two at once.
TEST(FeedRanks, Pitfall25_UnevenLastStepGivesEachRankAsManyMicroBatchesAndNoneEmpty) {
  struct Case {
    int64_t samples, dp, accumulation;
    std::vector<size_t> micro_batches;  // of each step
  };
  TemporaryFolder dir;
  for (const Case& c : {Case{5, 2, 1, {1, 1}}, Case{10, 3, 1, {1, 1}}, Case{5, 2, 2, {2}},
                        Case{11, 2, 3, {3}}, Case{13, 4, 2, {2}}}) {
    Corpus corpus = corpus_of(dir, c.samples, 3, 8);
    ASSERT_EQ(corpus.windows(Split::Train, 8), c.samples);
    Options o = options_of(8, 2, c.accumulation, c.dp);
    std::multiset<int64_t> trained;
    std::set<int64_t> steps;
    for (int r = 0; r < c.dp; ++r) {
      Feed feed(corpus, o, {r, int(c.dp)});
      steps.insert(feed.steps());
      for (int64_t s = 0; s < feed.steps(); ++s) {
        StepBatch step = feed.step(s);
        ASSERT_LT(size_t(s), c.micro_batches.size());
        EXPECT_EQ(step.micro_batches.size(), c.micro_batches[size_t(s)]) << r << " " << s;
        int64_t batch = o.batch_sequences();
        EXPECT_EQ(step.tokens, 8 * std::min(batch, c.samples - s * batch));
        int64_t valid = 0;
        for (const MicroBatch& b : step.micro_batches) {
          EXPECT_GT(b.inputs.size(), 0);
          std::vector<int64_t> here = samples_of(b);
          trained.insert(here.begin(), here.end());
          valid += int64_t(here.size()) * 8;
        }
        EXPECT_EQ(step.valid.values<int64_t>()[0], valid);
      }
    }
    EXPECT_EQ(steps.size(), 1u) << "ranks disagree on the number of steps";
    EXPECT_EQ(*steps.begin(), int64_t(c.micro_batches.size()));
    std::multiset<int64_t> once;
    for (int64_t i = 0; i < c.samples; ++i) once.insert(i);
    EXPECT_EQ(trained, once) << c.samples << " samples, " << c.dp << " ranks";
  }
}

// A pad adds nothing: five samples over two ranks give what they give on one.
TEST(FeedRanks, Pitfall25_PadsChangeNeitherLossNorGradient) {
  TemporaryFolder dir;
  Corpus corpus = corpus_of(dir, 5, 3, 8);
  LayoutRig::Settings s;
  s.config.vocab = 256;
  auto gradients = [&](int dp, Sync sync, StepState& state) {
    Options o = options_of(8, 2, 4 / dp, dp);
    Whole whole;
    s.sync = sync;
    run_threads(dp, Device::CPU, {}, [&](Communicator& world) {
      ProcessMesh mesh(world, {.dp = dp});
      LayoutRig rig(s, mesh);
      rig.gradients(Feed(corpus, o, {world.rank(), dp}).step(0).micro_batches);
      whole.add(rig.parallel->owned(), &Owned::grad);
      rig.optimizer->step();
      rig.parallel->publish();
      if (world.rank() == 0) state = rig.state();
    });
    return whole.get();
  };
  StepState one, many;
  auto expected = gradients(1, Sync::Naive, one);
  EXPECT_EQ(one.valid_tokens, 40);
  for (int dp : {2, 4})
    for (Sync sync : {Sync::Bucketed, Sync::Zero3}) {
      auto found = gradients(dp, sync, many);
      EXPECT_EQ(many.valid_tokens, 40);
      EXPECT_NEAR(many.loss, one.loss, 1e-6);
      for (const auto& [name, g] : expected)
        EXPECT_LT(relative_error(found[name], g), 1e-5) << name << " " << dp << name_of(sync);
    }
}

TEST(FeedRanks, Pitfall106_RanksTakeDisjointSamplesOfOneGlobalOrder) {
  TemporaryFolder dir;
  Corpus corpus = corpus_of(dir, 64, 3, 4);
  // Per step: the texts that all ranks together read.
  auto steps_of = [&](int dp) {
    Options o = options_of(4, 2, 8 / dp, dp);
    std::vector<std::multiset<std::vector<int32_t>>> steps;
    std::set<int64_t> numbers;
    size_t samples = 0;
    for (int r = 0; r < dp; ++r) {
      Feed feed(corpus, o, {r, dp});
      steps.resize(size_t(feed.steps()));
      for (int64_t s = 0; s < feed.steps(); ++s)
        for (const MicroBatch& b : feed.step(s).micro_batches) {
          std::vector<int32_t> tokens = b.inputs.values<int32_t>();
          for (int64_t i = 0; i < b.sequences; ++i)
            steps[size_t(s)].insert({tokens.begin() + i * 4, tokens.begin() + (i + 1) * 4});
          for (int64_t n : samples_of(b)) numbers.insert(n), ++samples;
        }
    }
    EXPECT_EQ(numbers.size(), 64u) << dp << " ranks do not see all windows";
    EXPECT_EQ(samples, 64u) << dp << " ranks see a window twice";
    return steps;
  };
  auto one = steps_of(1);
  EXPECT_EQ(one.size(), 4u);
  EXPECT_EQ(steps_of(2), one);
  EXPECT_EQ(steps_of(4), one);
}

TEST(FeedRanks, Pitfall108_EveryValidationWindowOnceOverAllRanks) {
  struct Case {
    int64_t windows, micro_batch;
    int ranks;
  };
  TemporaryFolder dir;
  for (const Case& c : {Case{10042, 8, 200}, Case{10042, 51, 197}, Case{3, 2, 5}, Case{7, 2, 3}}) {
    Corpus corpus = corpus_of(dir, c.windows, c.windows, 2);
    ASSERT_EQ(corpus.windows(Split::Validation, 2), c.windows);
    Options o = options_of(2, c.micro_batch, 1, c.ranks);
    o.evaluation_batches = 1'000'000;
    std::vector<int> times(size_t(c.windows), 0);
    std::set<size_t> forwards;
    for (int r = 0; r < c.ranks; ++r) {
      std::vector<MicroBatch> batches = Feed(corpus, o, {r, c.ranks}).validation();
      forwards.insert(batches.size());
      for (const MicroBatch& b : batches) {
        EXPECT_GT(b.inputs.size(), 0);
        EXPECT_FALSE(b.training);
        for (int64_t n : samples_of(b)) ++times[size_t(n)];
      }
    }
    EXPECT_EQ(forwards.size(), 1u) << "ranks would not meet in the same collectives";
    EXPECT_EQ(times, std::vector<int>(size_t(c.windows), 1));
  }
}

// ---- One loss

// A loss of which we know what comes out: each valid target of rank r costs `mean`.
Parts parts_that_cost(double mean) {
  Parts parts = plain_parts();
  parts.loss = [mean](Tape&, const Var&, Parameter&, const MicroBatch& b, const Tensor& scale) {
    int64_t valid = 0;
    for (int32_t target : b.targets.values<int32_t>()) valid += target >= 0;
    float loss = float(mean * double(valid)) * scale.values<float>()[0];
    return Var{Tensor::from<float>({loss}, {1}, Device::CPU)};
  };
  return parts;
}

// Losses of 1 and 3 on two ranks: what the rank that prints shows, and what all of them know.
void expect_loss(std::vector<int64_t> valid, double expected) {
  TemporaryFolder dir;
  std::vector<double> evaluated(2), trained(2);
  run_threads(2, Device::CPU, {}, [&](Communicator& world) {
    const size_t r = size_t(world.rank());
    ModelConfig config = small_config();
    Stage model(config, parts_that_cost(r == 0 ? 1 : 3), DType::F32, Device::CPU);
    DataParallel parallel({&model}, {});
    parallel.allocate();
    initialise(parallel.owned(), 1);
    std::vector<int32_t> inputs(4, 7), targets(4, -1);
    std::fill_n(targets.begin(), valid[r], 7);
    MicroBatch batch = micro_batch(inputs, targets, 1);

    evaluated[r] = evaluate(model, {batch}, &world);

    AdamW optimizer(parallel.owned(), {}, Device::CPU, &world);
    parallel.begin_step(1);
    Tensor count = Tensor::from<int64_t>({valid[r]}, {1});
    world.all_reduce(count).wait();
    optimizer.begin_step(count);
    Tape tape;
    optimizer.add_loss(
        model.loss(tape, model.forward(tape, batch), batch, optimizer.scale()).value);
    optimizer.step();
    trained[r] = on_host(optimizer.state()).loss;

    Options o;
    o.config = config;
    o.log = dir / text("log", 0);
    Report report(o, 1, {world.rank(), 2});
    report.step(1, optimizer.state(), 8);
    report.finish();
  });
  for (size_t r = 0; r < 2; ++r) {
    EXPECT_DOUBLE_EQ(evaluated[r], expected) << r;
    EXPECT_NEAR(trained[r], expected, 1e-6) << r;
  }
  std::istringstream log(content_of(dir / "log0"));
  std::string line, more;
  std::getline(log, line);
  EXPECT_NEAR(nlohmann::json::parse(line).at("loss").get<double>(), expected, 1e-6);
  EXPECT_FALSE(std::getline(log, more)) << "two ranks have written: " << more;
}

TEST(FeedRanks, Pitfall23_LossIsThatOfTheWholeBatchWhoeverPrintsIt) {
  ::testing::internal::CaptureStdout();
  expect_loss({2, 2}, 2.0);
  EXPECT_EQ(::testing::internal::GetCapturedStdout().substr(0, 20), "step 1/1  loss 2.000");
  ::testing::internal::CaptureStdout();
  expect_loss({1, 3}, 2.5);
  std::string out = ::testing::internal::GetCapturedStdout();
  EXPECT_EQ(out.substr(0, 20), "step 1/1  loss 2.500");
  EXPECT_EQ(std::count(out.begin(), out.end(), '\n'), 1) << out;  // one rank speaks
}

TEST(FeedRanks, ANonFiniteLossEndsAllRanksInTheSameStep) {
  Tensor state = Tensor::zeros({sizeof(StepState)}, DType::U8, Device::CPU);
  StepState bad;
  bad.stopped = 1;
  std::memcpy(state.raw(), &bad, sizeof bad);
  for (int r = 0; r < 3; ++r) {
    Options o;
    o.config = small_config();
    Report report(o, 4, {r, 3});
    report.step(1, state, 8);  // known one step late
    expect_refusal([&] { report.step(2, state, 8); }, {"step 1:", "training stops"});
  }
}

// MFU is of one device: twice the tokens on twice the devices are the same use of each.
TEST(FeedRanks, UtilisationCountsAllTokensOverAllDevices) {
  const char* kDevice = "NVIDIA A100-SXM4-80GB";
  Efficiency one(small_config(), 8, Recompute::None, DType::BF16, kDevice);
  Efficiency four(small_config(), 8, Recompute::None, DType::BF16, kDevice, 4);
  EXPECT_DOUBLE_EQ(*four.at(4e6).mfu, *one.at(1e6).mfu);
  EXPECT_DOUBLE_EQ(*four.at(4e6).hfu, *one.at(1e6).hfu);
}

// ---- One model

TEST(FeedRanks, Pitfall22_RanksWithSeedsOfTheirOwnStartFromRank0sWeightsAndStayEqual) {
  TemporaryFolder dir;
  Corpus corpus = corpus_of(dir, 24, 3, 8);
  for (Sync sync : kAllSyncs) {
    std::vector<std::vector<int32_t>> first_inputs(2);
    run_threads(2, Device::CPU, {}, [&](Communicator& world) {
      ProcessMesh mesh(world, {.dp = 2});
      Options o = options_of(8, 2, 2, 2);
      o.config = small_config();
      o.config.vocab = 256;
      o.seed = 100 + uint64_t(world.rank());
      settle_ranks(o, mesh);
      EXPECT_EQ(o.seed, 100u);
      LayoutRig::Settings s;
      s.config = o.config;
      s.sync = sync;
      s.seed = 7 + uint64_t(world.rank());  // whatever was there before
      LayoutRig rig(s, mesh);
      for (Unit* unit : rig.model->units()) {
        rig.parallel->acquire(*unit, DataParallel::Pass::Evaluation);
        rig.parallel->release(*unit, DataParallel::Pass::Evaluation);
      }
      start_weights({rig.model.get()}, rig.parallel->owned(), o, &mesh.data());
      rig.parallel->publish();
      check_replicas({rig.model.get()}, *rig.parallel, mesh, 0);
      Feed feed(corpus, o, {world.rank(), 2});
      for (int64_t step = 1; step <= 3; ++step) {
        rig.step(feed.step(step - 1).micro_batches);
        check_replicas({rig.model.get()}, *rig.parallel, mesh, step);
      }
      first_inputs[size_t(world.rank())] = feed.step(0).micro_batches[0].inputs.values<int32_t>();
    });
    EXPECT_NE(first_inputs[0], first_inputs[1]);  // other samples, same order
  }
}

TEST(FeedRanks, Pitfall22_ACopyThatDiffersIsNamedWithItsRank) {
  for (Sync sync : {Sync::Naive, Sync::Bucketed, Sync::Zero1, Sync::Zero2}) {
    expect_refusal(
        [&] {
          run_threads(3, Device::CPU, {}, [&](Communicator& world) {
            ProcessMesh mesh(world, {.dp = 3});
            LayoutRig::Settings s;
            s.sync = sync;
            LayoutRig rig(s, mesh);
            check_replicas({rig.model.get()}, *rig.parallel, mesh, 0);
            if (world.rank() == 2) {
              for (Parameter* p : rig.model->parameters())
                if (p->name == "model.layers.1.mlp.down_proj.weight")
                  p->value.data<float>()[5] *= 1 + 1e-6f;
            }
            check_replicas({rig.model.get()}, *rig.parallel, mesh, 4);
          });
        },
        {"after step 4", "rank 2's copy of model.layers.1.mlp.down_proj.weight"});
  }
}

// Rank 0 reads the files; the others need none.
TEST(FeedRanks, Pitfall22_LoadedWeightsAreRank0s) {
  Options o;
  o.hugging_face = LOCKSTEP_SOURCE_DIR "/tests/reference/tiny_llama";
  o.config = read_config(o.hugging_face);
  auto load = [&](int dp, Sync sync) {
    Whole whole;
    run_threads(dp, Device::CPU, {}, [&](Communicator& world) {
      ProcessMesh mesh(world, {.dp = dp});
      Options mine = o;
      if (world.rank() > 0) mine.hugging_face = "/nowhere/at/all";
      LayoutRig::Settings s;
      s.config = o.config;
      s.sync = sync;
      LayoutRig rig(s, mesh);
      start_weights({rig.model.get()}, rig.parallel->owned(), mine, &mesh.data());
      whole.add(rig.parallel->owned(), &Owned::master);
    });
    return whole.get();
  };
  auto one = load(1, Sync::Naive);
  EXPECT_EQ(load(2, Sync::Bucketed), one);
  EXPECT_EQ(load(3, Sync::Zero1), one);
}

}  // namespace
}  // namespace lockstep
