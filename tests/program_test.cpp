// The program as its user meets it: flags, files, refusals, and what it prints.

#include <gtest/gtest.h>
#include <sys/stat.h>

#include <cstdio>
#include <fstream>
#include <nlohmann/json.hpp>

#include "common/device.h"
#include "common/feed.h"
#include "common/report.h"
#include "tests/rig.h"
#include "tests/shell.h"

namespace lockstep {
namespace {

const char* const kTrain = LOCKSTEP_BINARY_DIR "/01_single_gpu/train";
// A model that a test has time for.
const char* const kSmall =
    " --device cpu --layers 1 --hidden 16 --heads 2 --sequence 16 --micro-batch 2 --sample 5"
    " --evaluation-batches 2 ";

Output train(const std::string& flags) { return shell(text(kTrain, " ", flags)); }

// One sentence on one line, before any work, and a non-zero exit.
void expect_refused(const std::string& flags, const std::vector<std::string>& parts) {
  Output run = train(flags);
  EXPECT_EQ(run.status, 1) << flags;
  EXPECT_EQ(run.lines().size(), 1u) << run.out;
  EXPECT_EQ(run.out.rfind("error: ", 0), 0u) << run.out;
  for (const std::string& part : parts)
    EXPECT_NE(run.out.find(part), std::string::npos) << run.out << " should name " << part;
}

std::string text_file(const TemporaryFolder& dir, int64_t bytes) {
  std::string path = dir / "text.txt";
  std::ofstream file(path);
  for (int64_t i = 0; i < bytes; ++i) file << char('a' + i * i % 7);
  return path;
}

TEST(Program, LastLineIsTheValidationLoss) {
  TemporaryFolder dir;
  Output run = train(kSmall + ("--steps 3 --data " + text_file(dir, 4000)));
  EXPECT_EQ(run.status, 0) << run.out;
  std::string last = run.lines().back();
  EXPECT_EQ(last.rfind("validation loss ", 0), 0u) << last;
  double loss = std::stod(last.substr(16));
  EXPECT_GT(loss, 1.0);
  EXPECT_LT(loss, 6.0);
  EXPECT_NE(run.out.find("sample:\n"), std::string::npos);
}

TEST(Program, DryRunPrintsThePlanAndRunsNothing) {
  TemporaryFolder dir;
  std::string log = dir / "log.jsonl";
  Output run = train(kSmall + ("--dry-run --log " + log + " --data " + text_file(dir, 4000)));
  EXPECT_EQ(run.status, 0) << run.out;
  for (const char* word : {"model ", "batch ", "steps ", "data ", "memory ", "device "})
    EXPECT_NE(run.out.find(word), std::string::npos) << run.out;
  EXPECT_EQ(run.out.find("step 1"), std::string::npos);
  EXPECT_FALSE(std::filesystem::exists(log));
}

TEST(Program, LogHasOneJsonLinePerStep) {
  TemporaryFolder dir;
  std::string log = dir / "log.jsonl";
  std::string data = text_file(dir, 4000);
  ASSERT_EQ(
      train(kSmall + ("--steps 7 --warmup 2 --evaluate-every 0 --log " + log + " --data " + data))
          .status,
      0);
  std::ifstream file(log);
  int64_t steps = 0;
  for (std::string line; std::getline(file, line);) {
    nlohmann::json j = nlohmann::json::parse(line);
    EXPECT_EQ(j.at("step"), ++steps);
    EXPECT_GT(j.at("loss"), 0);
    EXPECT_GT(j.at("gradient_norm"), 0);
    EXPECT_EQ(j.at("tokens"), 32);
  }
  EXPECT_EQ(steps, 7);
}

TEST(Program, ConfigFileGivesSettingsAndFlagsWin) {
  TemporaryFolder dir;
  std::string config = dir / "run.json", data = text_file(dir, 4000);
  std::ofstream(config) << R"({"sequence": 32, "micro-batch": 3, "data": ")" << data
                        << R"(", "tied": true})";
  Output run = train("--device cpu --dry-run --config " + config + " --micro-batch 5");
  EXPECT_EQ(run.status, 0) << run.out;
  EXPECT_NE(run.out.find("5 sequences x 32 tokens"), std::string::npos) << run.out;
  std::ofstream(config) << R"({"sequense": 32})";
  expect_refused("--dry-run --config " + config, {"sequense"});
  std::ofstream(config) << R"({"sequence": 32)";
  expect_refused("--dry-run --config " + config, {"config"});
  expect_refused("--dry-run --config " + config + ".absent", {"absent"});
}

TEST(Program, Pitfall4_GlobalBatchBelowOneForward) {
  for (const char* tokens : {"1024", "3000"})
    expect_refused(std::string("--sequence 512 --micro-batch 4 --batch-tokens ") + tokens,
                   {tokens, "2048", "multiple"});
  EXPECT_EQ(accumulation_for(4096, 4, 512), 2);
}

TEST(Program, RefusesWrongFlagsInOneSentence) {
  expect_refused("--layer 3", {"--layer"});
  expect_refused("--layers 0", {"layers", "0"});
  expect_refused("--layers two", {"two"});
  expect_refused("--heads 6 --hidden 64", {"64", "6"});
  expect_refused("--heads 6 --hidden 48 --kv-heads 4", {"6", "4"});
  expect_refused("--model 9B", {"9B", "1.7B"});
  expect_refused("--dtype fp8", {"fp8"});
  expect_refused("--dropout 1.5", {"1.5"});
  expect_refused("--data /nowhere/at/all.txt", {"/nowhere/at/all.txt"});
  expect_refused("--hf /nowhere/at/all", {"/nowhere/at/all"});
  expect_refused("--grad-dtype bf16 --dtype fp32", {"bf16", "fp32"});
  if (!device::available()) expect_refused("--device cuda", {"cuda"});
  expect_refused("--hf /tmp --model 135M", {"--hf", "--model"});
}

// Numbers that overflow, and numbers that are none.
TEST(Program, RefusesNumbersBeyondAllReason) {
  for (const char* flag : {"--steps", "--micro-batch", "--sequence", "--epochs", "--batch-tokens",
                           "--evaluation-batches", "--layers", "--seed"}) {
    expect_refused(std::string(flag) + " 9223372036854775808", {flag, "9223372036854775808"});
    expect_refused(std::string(flag) + " -1", {flag, "-1"});
    expect_refused(std::string(flag) + " ''", {flag, "''"});
  }
  expect_refused("--micro-batch 9223372036854775807", {"--micro-batch", "1000000"});
  for (const char* flag :
       {"--learning-rate", "--clip", "--weight-decay", "--temperature", "--floor"})
    for (const char* value : {"nan", "inf", "1e300", "-1"})
      expect_refused(std::string(flag) + " " + value, {flag, value});
  expect_refused("--learning-rate 0", {"'0' is not a number above 0"});
  expect_refused("--layers 10000 --hidden 1000000 --heads 1 --ffn 1000000", {"parameters"});
}

TEST(Program, APipeIsNoFileAndIsNotWaitedFor) {
  TemporaryFolder dir;
  std::string pipe = dir / "pipe";
  ASSERT_EQ(mkfifo(pipe.c_str(), 0600), 0);
  expect_refused("--dry-run --data " + pipe, {pipe, "cannot be read"});
}

// A speed is a time divided by nothing at first: then it is not shown.
TEST(Program, SpeedIsShownOnceItIsKnown) {
  TemporaryFolder dir;
  Output run = train(kSmall + ("--steps 4 --evaluate-every 0 --data " + text_file(dir, 4000)));
  std::string first, last;
  for (const std::string& line : run.lines()) {
    if (line.rfind("step 1/", 0) == 0) first = line;
    if (line.rfind("step 4/", 0) == 0) last = line;
  }
  EXPECT_EQ(first.find("tokens/s"), std::string::npos) << first;
  EXPECT_NE(last.find("tokens/s"), std::string::npos) << last;
}

TEST(Program, RefusesALogThatCannotBeWritten) {
  TemporaryFolder dir;
  std::string data = text_file(dir, 4000);
  Output run = train(kSmall + ("--steps 2 --log /nowhere/log.jsonl --data " + data));
  EXPECT_EQ(run.status, 1);
  EXPECT_NE(run.out.find("/nowhere/log.jsonl"), std::string::npos) << run.out;
  EXPECT_EQ(run.out.find("step 1/"), std::string::npos) << run.out;
}

TEST(Program, NonFiniteLossEndsTheRun) {
  TemporaryFolder dir;
  std::string data = text_file(dir, 4000);
  Output run =
      train(kSmall + ("--steps 50 --learning-rate 1000000 --clip 0 --warmup 0 --data " + data));
  EXPECT_EQ(run.status, 1);
  std::string last = run.lines().back();
  EXPECT_NE(last.find("error: step "), std::string::npos) << run.out;
  EXPECT_NE(last.find("training stops"), std::string::npos) << run.out;
}

// 7 micro-batches in an epoch, 4 to a step: two steps, the second over its own three.
TEST(Program, Pitfall3_LastIncompleteStepIsTrained) {
  TemporaryFolder dir;
  Options o;
  o.sequence = 8;
  o.micro_batch = 2;
  o.batch_tokens = 4 * 2 * 8;
  o.epochs = 1;
  CorpusOptions where;
  where.data = text_file(dir, 14 * 8 + 1 + 9);
  where.length = 8;
  where.validation_fraction = 0.05;
  Corpus corpus(where);
  ASSERT_EQ(corpus.windows(Split::Train, 8), 14);
  Feed feed(corpus, o);
  EXPECT_EQ(feed.steps(), 2);
  StepBatch first = feed.step(0), second = feed.step(1);
  EXPECT_EQ(first.micro_batches.size(), 4u);
  EXPECT_EQ(second.micro_batches.size(), 3u);
  EXPECT_EQ(first.valid.values<int64_t>()[0], 64);
  EXPECT_EQ(second.valid.values<int64_t>()[0], 48);
  // its loss is the mean over its own tokens
  Rig::Settings s;
  s.config.vocab = 256;
  Rig rig(s), alone(s);
  rig.gradients(second.micro_batches, second.valid);
  double sum = 0;
  for (const MicroBatch& b : second.micro_batches) {
    alone.gradients({b});
    sum += alone.state().loss;
  }
  EXPECT_NEAR(rig.state().loss, sum / 3, 1e-5);
}

TEST(Program, Pitfall114_EvaluationDoesNotDisturbTraining) {
  TemporaryFolder dir;
  std::string data = text_file(dir, 4000);
  auto losses = [&](const std::string& every) {
    std::string log = dir / ("log" + every);
    EXPECT_EQ(train(kSmall + ("--steps 6 --dropout 0.1 --evaluate-every " + every + " --log " +
                              log + " --data " + data))
                  .status,
              0);
    std::vector<double> all;
    std::ifstream file(log);
    for (std::string line; std::getline(file, line);) {
      nlohmann::json j = nlohmann::json::parse(line);
      if (j.contains("loss")) all.push_back(j.at("loss"));
    }
    return all;
  };
  std::vector<double> never = losses("0"), always = losses("1");
  ASSERT_EQ(never.size(), 6u);
  EXPECT_EQ(never, always);
}

TEST(Program, Pitfall137_ArchitectureMismatchNamesTheWayOut) {
  auto sentence = [](int major, int minor, const char* compiled) {
    return device::architecture_mismatch("GPU", major, minor, compiled);
  };
  EXPECT_EQ(sentence(9, 0, "80 90a"), "");
  EXPECT_EQ(sentence(9, 0, "90a"), "");
  EXPECT_EQ(sentence(8, 9, "80 90a"), "");   // the same major
  EXPECT_EQ(sentence(12, 0, "80 90a"), "");  // through the PTX of 80
  std::string old = sentence(7, 5, "80 90a"), other = sentence(10, 0, "90a");
  EXPECT_NE(old.find("GPU has compute capability 7.5"), std::string::npos) << old;
  EXPECT_NE(old.find("80 90a"), std::string::npos) << old;
  EXPECT_NE(old.find("LOCKSTEP_CUDA_ARCHITECTURES=75"), std::string::npos) << old;
  EXPECT_NE(other.find("LOCKSTEP_CUDA_ARCHITECTURES=100"), std::string::npos) << other;
}

TEST(Program, DurationsAreReadable) {
  EXPECT_EQ(duration(12.4), "12s");
  EXPECT_EQ(duration(185), "3m 05s");
  EXPECT_EQ(duration(3720), "1h 02m");
}

}  // namespace
}  // namespace lockstep
