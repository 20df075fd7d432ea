// The training programs of 02 and 03 as their user meets them: as threads and as processes, with
// their own checks, with checkpoints, and with flags that are wrong.

#include <gtest/gtest.h>

#include <cmath>
#include <cstdio>
#include <cstring>

#include "common/checks.h"
#include "common/plan.h"
#include "tests/layout.h"
#include "tests/shell.h"

namespace lockstep {
namespace {

const std::string kDataParallel = LOCKSTEP_BINARY_DIR "/02_data_parallel/train";
const std::string kZero = LOCKSTEP_BINARY_DIR "/03_zero/train";

struct Program : SmallRun {
  Program()
      : SmallRun({{"layers", 2},
                  {"hidden", 20},
                  {"heads", 2},
                  {"batch-tokens", 16 * 24},
                  {"steps", 6},
                  {"evaluate-every", 4}}) {}
  Output run(const std::string& program, const std::string& more) const {
    return shell_of_ranks(program + flags(more));
  }

  // loss, norm, tokens of every step that was logged.
  std::map<int64_t, std::vector<double>> log(const std::string& name) const {
    std::map<int64_t, std::vector<double>> steps;
    std::istringstream lines(content_of(folder / name));
    for (std::string line; std::getline(lines, line);) {
      nlohmann::json j = nlohmann::json::parse(line);
      if (!j.contains("loss")) continue;
      bool fresh =
          steps
              .try_emplace(j.at("step"), std::vector<double>{j.at("loss"), j.at("gradient_norm"),
                                                             j.at("tokens"), j.at("valid_tokens")})
              .second;
      EXPECT_TRUE(fresh) << "step " << j.at("step") << " is logged twice";
    }
    return steps;
  }
};

void expect_close(const std::map<int64_t, std::vector<double>>& a,
                  const std::map<int64_t, std::vector<double>>& b) {
  ASSERT_EQ(a.size(), b.size());
  for (const auto& [step, values] : a)
    for (size_t i = 0; i < values.size(); ++i)
      EXPECT_NEAR(values[i], b.at(step)[i], 1e-4 * values[i]) << "step " << step;
}

TEST(ParallelProgram, EverySyncAndEveryStagePassTheirOwnChecks) {
  Program p;
  auto expect_checked = [&](const std::string& program, const std::string& flags) {
    Output run = p.run(program, "--check --check-replicas --ranks 2 " + flags);
    EXPECT_EQ(run.status, 0) << flags << run.out;
    EXPECT_TRUE(run.says("check   6 steps are those of one rank")) << flags << run.out;
    EXPECT_TRUE(run.says("384 tokens a step = 2 ranks x 6 micro-batches x 2")) << run.out;
    double loss = std::stod("0" + run.after("\nvalidation loss "));
    EXPECT_GT(loss, 1.0) << run.out;
    EXPECT_LT(loss, 6.0) << run.out;
    EXPECT_EQ(run.out.find("step 1/"), run.out.rfind("step 1/")) << run.out;  // one rank speaks
  };
  for (const char* sync : {"naive", "overlapped", "bucketed", "bucketed --bucket-mb 0.004"})
    expect_checked(kDataParallel, text("--sync ", sync));
  for (const char* stage : {"0", "1", "1 --gather optimizer", "2 --bucket-mb 0.004", "3 --tied",
                            "3 --recompute full", "2 --dropout 0.1 --gather optimizer"})
    expect_checked(kZero, text("--stage ", stage));
}

// Prediction and measurement, from the lines that are printed.
TEST(ParallelProgram, ZeroPrintsBytesAndVolumesBesideTheirFormulas) {
  Program p;
  for (int stage = 0; stage <= 3; ++stage)
    for (const char* more : {"", " --tied", " --dtype bf16", " --dtype bf16 --grad-dtype bf16"}) {
      Output run =
          p.run(kZero, text("--ranks 3 --batch-tokens 288 --steps 2 --stage ", stage, more));
      ASSERT_EQ(run.status, 0) << run.out;
      std::istringstream lines(run.out);
      std::map<int, std::vector<int64_t>> predicted, measured;
      int64_t moved = -1, formula = -2;
      for (std::string line, word; std::getline(lines, line);) {
        std::istringstream in(line);
        int rank = 0;
        if (!(in >> word)) continue;
        if (word == "predicted" || word == "measured") {
          in >> rank;
          std::vector<int64_t> bytes(4);
          for (int64_t& b : bytes) in >> b;
          (word == "predicted" ? predicted : measured)[rank] = bytes;
        }
        if (word == "moved") {
          in >> moved;
          formula = std::stoll(line.substr(line.find("predicted ") + 10));
        }
      }
      EXPECT_EQ(predicted.size(), 3u) << run.out;
      EXPECT_EQ(measured, predicted) << stage << more << run.out;
      EXPECT_EQ(moved, formula) << stage << more << run.out;
    }
}

// S12 over ranks: however a step's 24 samples are cut, they are the same step.
TEST(ParallelProgram, S12_ResultDependsNeitherOnRanksNorOnAccumulation) {
  Program p;
  auto losses = [&](const std::string& program, const std::string& flags) {
    Output run = p.run(program, flags + " --log " + p.at("log"));
    EXPECT_EQ(run.status, 0) << run.out;
    auto log = p.log("log");
    EXPECT_EQ(log.size(), 6u);
    log[100] = {std::stod("0" + run.after("\nvalidation loss "))};
    return log;
  };
  auto one = losses(LOCKSTEP_BINARY_DIR "/01_single_gpu/train", "--evaluation-batches 4");
  for (const auto& [step, values] : one) {
    if (step == 100) continue;
    EXPECT_EQ(values[2], 384);
    EXPECT_EQ(values[3], 384);
  }
  expect_close(losses(kDataParallel, "--evaluation-batches 4"), one);
  expect_close(losses(kDataParallel, "--ranks 2 --evaluation-batches 4"), one);
  expect_close(losses(kDataParallel, "--ranks 3 --micro-batch 4 --evaluation-batches 2"), one);
  expect_close(losses(kZero, "--ranks 4 --micro-batch 1 --evaluation-batches 8 --stage 2"), one);
  expect_close(losses(kZero, "--ranks 2 --micro-batch 12 --evaluation-batches 1 --stage 3"),
               losses(kDataParallel, "--micro-batch 12 --evaluation-batches 1"));
}

TEST(ParallelProgram, Pitfall25_LastStepOfAnEpochIsSharedByAllRanks) {
  Program p;  // 96 windows to train on: two steps of 40 and one of 16
  Output run = p.run(kZero,
                     "--ranks 5 --epochs 1 --batch-tokens 640 --steps 9 --micro-batch 4 "
                     "--stage 3 --check --check-replicas --log " +
                         p.at("log"));
  EXPECT_EQ(run.status, 0) << run.out;
  auto log = p.log("log");
  double tokens = 0;
  for (const auto& [step, values] : log) tokens += values[2];
  int64_t windows = int64_t(tokens) / 16;
  EXPECT_EQ(int64_t(log.size()), (windows + 39) / 40);
  EXPECT_LT(log.rbegin()->second[2], 640);
  EXPECT_EQ(log.rbegin()->second[2], log.rbegin()->second[3]);
}

TEST(ParallelProgram, StoppedAndResumedRunEqualsTheWholeOne) {
  Program p;
  for (int stage = 0; stage <= 3; ++stage) {
    const std::string run =
        text("--ranks 2 --stage ", stage, " --checkpoint ", p.at(text("run", stage)));
    ASSERT_EQ(p.run(kZero, text("--ranks 2 --stage ", stage, " --log ", p.at("whole"), " --export ",
                                p.at("a")))
                  .status,
              0);
    const std::string log = text(" --log ", p.at(text("parts", stage)));
    ASSERT_EQ(p.run(kZero, run + log + " --stop-after 3").status, 0);
    Output second = p.run(kZero, text(run, log, " --resume --export ", p.at("b")));
    ASSERT_EQ(second.status, 0) << second.out;
    EXPECT_TRUE(second.says("step_00000003: 3 of 6 steps are done")) << second.out;
    EXPECT_EQ(p.log(text("parts", stage)), p.log("whole"));
    EXPECT_EQ(content_of(p.folder / "b/model.safetensors"),
              content_of(p.folder / "a/model.safetensors"));
  }
  // And with other ranks, another micro-batch and another stage, all but bit by bit.
  std::filesystem::remove_all(p.at("run1/step_00000006"));
  Output other = p.run(kZero, text("--ranks 3 --micro-batch 4 --stage 3 --resume --checkpoint ",
                                   p.at("run1"), " --log ", p.at("other")));
  ASSERT_EQ(other.status, 0) << other.out;
  auto last = p.log("whole");
  for (int64_t step : {1, 2, 3}) last.erase(step);
  expect_close(p.log("other"), last);
}

// One sentence, before any work, and a non-zero exit.
TEST(ParallelProgram, RefusesWhatCannotWork) {
  Program p;
  auto refused = [&](const std::string& program, const std::string& flags,
                     const std::vector<std::string>& parts) {
    Output run = p.run(program, flags);
    EXPECT_EQ(run.status, 1) << flags << run.out;
    size_t error = run.out.find("error: ");
    ASSERT_NE(error, std::string::npos) << run.out;
    EXPECT_EQ(run.out.find('\n', error), run.out.size() - 1) << run.out;
    EXPECT_FALSE(run.says("step 1/")) << run.out;
    for (const std::string& part : parts) EXPECT_TRUE(run.says(part)) << run.out << part;
  };
  refused(kDataParallel, "--sync fast", {"--sync", "fast", "bucketed"});
  refused(kDataParallel, "--bucket-mb 0", {"--bucket-mb"});
  refused(kDataParallel, "--ranks 0", {"--ranks"});
  refused(kDataParallel, "--stage 1", {"--stage"});
  refused(kZero, "--stage 4", {"--stage", "4"});
  refused(kZero, "--gather never", {"--gather", "never"});
  refused(kZero, "--stage 3 --gather optimizer", {"--gather", "stages 1 and 2", "--stage 3"});
  refused(kZero, "--stage 3 --bucket-mb 4", {"--bucket-mb", "stages 0 to 2"});
  refused(kDataParallel, "--sync naive --bucket-mb 4", {"--bucket-mb", "bucketed", "naive"});
  refused(kDataParallel, "--device cpu --matmul ladder", {"--matmul ladder", "GPU", "CPU"});
  refused(kDataParallel, text("--log ", p.at("same"), " --trace ", p.at("same")),
          {"--log", "--trace", "both write", "two files"});
  refused(kZero, text("--ranks 2 --check --resume --checkpoint ", p.at("run")),
          {"--check", "--resume"});
  for (const std::string& program : {kDataParallel, kZero}) {
    refused(program, "--ranks 5", {"384 tokens", "2.4 micro-batches", "5 ranks", "5 x 2 x 16"});
    refused(program, "--ranks 8 --micro-batch 6", {"0.5 micro-batches", "768 tokens at once"});
  }
}

// One file with all ranks, each with its messages, and one line that says how much was hidden.
TEST(ParallelProgram, TraceHasAllRanksAndCommunicationIsMeasured) {
  Program p;
  for (const std::string& command :
       {kDataParallel + p.flags("--sync naive"), kZero + p.flags("--stage 3")}) {
    Output run = shell_of_ranks(command + " --ranks 2 --profile --trace " + p.at("trace.json"));
    ASSERT_EQ(run.status, 0) << run.out;
    double here = 0, least = 0, most = -1;
    const char* measured = std::strstr(run.out.c_str(), "\ncommunication ");
    ASSERT_TRUE(measured) << run.out;
    EXPECT_EQ(std::sscanf(measured,
                          " communication %*f ms a step, %lf ms of it exposed (%*f %%) exposed %lf "
                          "to %lf ms",
                          &here, &least, &most),
              3)
        << run.out;
    EXPECT_TRUE(least <= here && here <= most && most > 0) << run.out;
    std::map<int, int> messages, forwards;
    const nlohmann::json trace = nlohmann::json::parse(content_of(p.folder / "trace.json"));
    for (const auto& e : trace["traceEvents"]) {
      if (e["ph"] != "X") continue;
      messages[e["pid"]] += e["cat"] == "communication";
      forwards[e["pid"]] += e["name"] == "forward";
    }
    EXPECT_EQ(messages.size(), 2u);
    EXPECT_GT(messages[0], 0);
    EXPECT_EQ(messages[0], messages[1]);
    EXPECT_EQ(forwards[0], 3 * 6);  // three steps of six micro-batches
    EXPECT_EQ(forwards[1], 3 * 6);
  }
}

TEST(ParallelProgram, DryRunPrintsThePlanOfAllRanks) {
  Program p;
  Output run = p.run(kZero, "--ranks 4 --dry-run --stage 3 --dtype bf16 --micro-batch 3");
  EXPECT_EQ(run.status, 0) << run.out;
  EXPECT_TRUE(run.says("4 ranks x 2 micro-batches x 3 sequences x 16 tokens")) << run.out;
  EXPECT_TRUE(run.says("memory  of each rank: ")) << run.out;
  EXPECT_FALSE(run.says("step 1/")) << run.out;
}

// A rank that forgets its sum, or takes part of it twice, is found by --check.
TEST(ParallelProgram, CheckFindsGradientsOfHalfTheBatchAndWrongWeights) {
  TemporaryFolder dir;
  std::string content;
  for (int i = 0; i < 400; ++i) content += char('a' + i * i % 23);
  Corpus corpus({dir.write("text.txt", content), 8});
  enum class Fault { None, NoSum, WrongWeight };
  auto run = [&](Fault fault) {
    run_threads(2, Device::CPU, {}, [&](Communicator& world) {
      ProcessMesh mesh(world, {.dp = 2});
      Options o;
      o.config = small_config();
      o.config.vocab = 256;
      o.sequence = 8;
      o.micro_batch = 2;
      o.seed = 5;
      o.steps = 3;
      settle_ranks(o, mesh);
      struct NoSum : Naive {
        using Naive::Naive;
        void finish() override {}
      };
      LayoutRig::Settings s;
      s.config = o.config;
      LayoutRig rig(s, mesh);
      std::unique_ptr<DataParallel> parallel;
      if (fault == Fault::NoSum) {
        rig.parallel =
            std::make_unique<NoSum>(std::vector<Stage*>{rig.model.get()}, mesh, s.parallel);
        rig.parallel->allocate();
        initialise(rig.parallel->owned(), o.seed);
        rig.optimizer = std::make_unique<AdamW>(rig.parallel->owned(), s.rule, Device::CPU, &world);
      }
      Reference reference(o, corpus, s.rule);
      Feed feed(corpus, o, {world.rank(), 2});
      for (int64_t step = 1; step <= 3; ++step) {
        rig.step(feed.step(step - 1).micro_batches);
        if (fault == Fault::WrongWeight && step == 2 && world.rank() == 1)
          rig.parallel->owned()[3].master.data<float>()[0] += 0.01f;
        reference.step(step, *rig.optimizer);
      }
    });
  };
  EXPECT_NO_THROW(run(Fault::None));
  expect_refusal([&] { run(Fault::NoSum); }, {"step 1: the gradient", "differs from one rank's"});
  expect_refusal([&] { run(Fault::WrongWeight); }, {"rank 1: step 2", "differs from one rank's"});
}

TEST(ParallelProgram, RunsAsProcessesOverMpi) {
  if (shell_of_ranks("command -v mpirun").status != 0) GTEST_SKIP() << "there is no mpirun here";
  Program p;
  const std::string launch = "LOCKSTEP_NO_INSTALL=1 LOCKSTEP_PROGRAMS=" LOCKSTEP_BINARY_DIR
                             " " LOCKSTEP_SOURCE_DIR "/lockstep run ";
  const std::string flags = p.flags(text("--check --check-replicas --checkpoint ", p.at("run"),
                                         " --stage 3 --log ", p.at("mpi")));
  Output run = shell_of_ranks(launch + "03 -n 2" + flags);
  ASSERT_EQ(run.status, 0) << run.out;
  EXPECT_TRUE(run.says("processes over MPI")) << run.out;
  EXPECT_TRUE(run.says("check   6 steps are those of one rank")) << run.out;
  // Sums are added in rank order in both: the same bits.
  ASSERT_EQ(p.run(kZero, "--ranks 2 --stage 3 --log " + p.at("threads")).status, 0);
  EXPECT_EQ(p.log("mpi"), p.log("threads"));
  Output refused =
      shell_of_ranks(launch + "02 -n 2" + p.flags("--batch-tokens 96 --micro-batch 6"));
  EXPECT_NE(refused.status, 0);
  EXPECT_TRUE(refused.says("error: rank 0: a global batch of 96 tokens would be 0.5"))
      << refused.out;
  EXPECT_FALSE(refused.says("error: rank 1")) << refused.out;
}

}  // namespace
}  // namespace lockstep
