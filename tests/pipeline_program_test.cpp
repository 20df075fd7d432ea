// The programs of 06 as their user meets them.

#include <gtest/gtest.h>

#include "06_pipeline_parallel/schedules.h"
#include "tests/shell.h"

namespace lockstep {
namespace {

const std::string kPrograms = LOCKSTEP_BINARY_DIR "/06_pipeline_parallel/";

// 24 sequences a step.
struct Program : SmallRun {
  Program()
      : SmallRun({{"layers", 8},
                  {"hidden", 20},
                  {"heads", 2},
                  {"batch-tokens", 16 * 24},
                  {"steps", 6},
                  {"evaluate-every", 4}}) {}
  Output train(const std::string& more) const {
    return shell_of_ranks(kPrograms + "train" + flags(more));
  }
};

double validation_loss(const Output& run) {
  return std::stod(text("0", run.after("\nvalidation loss ")));
}

TEST(PipelineProgram, EveryScheduleIsOneRank) {
  Program p;
  double one = validation_loss(shell_of_ranks(LOCKSTEP_BINARY_DIR "/01_single_gpu/train" +
                                              p.flags("--evaluation-batches 4")));
  EXPECT_GT(one, 1);
  auto expect_checked = [&](const std::string& flags) {
    Output run = p.train(text("--check --check-replicas --evaluation-batches 4 ", flags));
    EXPECT_EQ(run.status, 0) << flags << run.out;
    EXPECT_TRUE(run.says("check   6 steps are those of one rank")) << flags << run.out;
    EXPECT_NEAR(validation_loss(run), one, 0.0011) << flags << run.out;       // printed to 0.001
    EXPECT_EQ(run.out.find("step 1/"), run.out.rfind("step 1/")) << run.out;  // one rank speaks
    EXPECT_TRUE(run.says("idle    all: ")) << run.out;
    EXPECT_TRUE(run.says("; simulated ")) << run.out;
  };
  for (const std::string& schedule : schedule_names())
    expect_checked(text("--ranks 2 --pp 2 --schedule ", schedule));
  expect_checked("--ranks 4 --pp 2 --schedule 1f1b --stage 1 --balance");
  expect_checked("--ranks 4 --pp 4 --schedule interleaved --group 12 --recompute full");
  expect_checked("--pp 1");
}

TEST(PipelineProgram, TiedModelsAndDropoutAreOneRankToo) {
  Program p;
  for (const char* flags :
       {"--tied --pp 2 --ranks 4 --stage 1", "--tied --pp 2 --ranks 2 --schedule zb-v",
        "--dropout 0.1 --pp 4 --ranks 4 --schedule zb-h2", "--dtype bf16 --pp 2 --ranks 2"}) {
    Output run = p.train(text("--check --check-replicas ", flags));
    EXPECT_EQ(run.status, 0) << flags << run.out;
    EXPECT_TRUE(run.says("check   6 steps are those of one rank")) << flags << run.out;
  }
}

TEST(PipelineProgram, CheckpointsOfOnePipelineLoadInAnother) {
  Program p;
  auto losses = [&](const std::string& flags, const std::string& log) {
    Output run = p.train(text(flags, " --log ", p.at(log)));
    EXPECT_EQ(run.status, 0) << run.out;
    std::map<int64_t, double> out;
    std::istringstream lines(content_of(p.folder / log));
    for (std::string line; std::getline(lines, line);) {
      nlohmann::json j = nlohmann::json::parse(line);
      if (j.contains("loss")) out[j.at("step")] = j.at("loss");
    }
    return out;
  };
  auto whole = losses("--ranks 4 --pp 2", "whole");
  EXPECT_EQ(whole.size(), 6u);
  losses(text("--ranks 4 --pp 2 --stop-after 3 --checkpoint ", p.at("run")), "first");
  for (const char* flags : {"--ranks 2 --pp 1", "--ranks 8 --pp 4 --schedule zb-h1 --stage 1"}) {
    std::filesystem::remove_all(p.at("copy"));
    std::filesystem::copy(p.at("run"), p.at("copy"), std::filesystem::copy_options::recursive);
    auto rest = losses(text(flags, " --resume --checkpoint ", p.at("copy")), text("log", flags[8]));
    EXPECT_EQ(rest.size(), 3u);
    for (auto [step, loss] : rest) EXPECT_NEAR(loss, whole.at(step), 1e-6 * loss) << flags << step;
  }
}

// A picture and a plan, planned beside measured.
TEST(PipelineProgram, ShowsItsStagesAndDrawsItsTimeline) {
  Program p;
  Output run = p.train("--ranks 2 --pp 2 --schedule zb-v --svg " + p.at("step.svg"));
  EXPECT_EQ(run.status, 0) << run.out;
  EXPECT_TRUE(run.says("rank 0 has embedding, layers 0 to 1, then layers 6 to 7, head")) << run.out;
  EXPECT_TRUE(run.says("rank 1 has layers 2 to 3, then layers 4 to 5")) << run.out;
  EXPECT_TRUE(run.says("times   stage 3: F ")) << run.out;
  std::string svg = content_of(p.folder / "step.svg");
  EXPECT_NE(svg.find("planned</text>"), std::string::npos);
  EXPECT_NE(svg.find("measured</text>"), std::string::npos);
  Output dry = p.train("--ranks 2 --pp 2 --dry-run");
  EXPECT_EQ(dry.status, 0) << dry.out;
  EXPECT_TRUE(dry.says("rank 1 has layers 4 to 7, head")) << dry.out;
  EXPECT_FALSE(dry.says("step 1/")) << dry.out;
}

// One sentence, before any work, and a non-zero exit.
TEST(PipelineProgram, RefusesWhatCannotWork) {
  Program p;
  auto refused = [&](const std::string& flags, const std::vector<std::string>& parts) {
    Output run = p.train(flags);
    EXPECT_EQ(run.status, 1) << flags << run.out;
    size_t error = run.out.find("error: ");
    ASSERT_NE(error, std::string::npos) << flags << run.out;
    EXPECT_EQ(run.out.find('\n', error), run.out.size() - 1) << run.out;
    EXPECT_FALSE(run.says("step 1/")) << run.out;
    for (const std::string& part : parts) EXPECT_TRUE(run.says(part)) << run.out << part;
  };
  refused("--ranks 3 --pp 2", {"--pp 2 does not divide 3 ranks"});
  refused("--pp 2", {"--pp 2 does not divide 1 rank"});
  refused("--pp 0", {"--pp", "from 1"});
  refused("--ranks 2 --schedule gpipe", {"gpipe", "afab, 1f1b"});
  refused("--ranks 2 --chunks 2", {"1f1b has 1 chunk on each rank, not 2"});
  refused("--ranks 2 --group 2", {"--group is for --schedule interleaved"});
  refused("--ranks 2 --layers 1", {"1 layer", "2 stages"});
  refused("--ranks 2 --schedule zb-v --layers 3", {"3 layers", "4 stages", "at most 3"});
  refused("--ranks 8 --pp 8 --schedule interleaved --layers 16",
          {"8 ranks cannot take 12 micro-batches in groups of 8"});
  refused("--ranks 8 --pp 8 --schedule dualpipe-v --layers 16",
          {"at least 16 micro-batches, not 12"});
  refused("--ranks 2 --stage 2", {"--stage"});
  refused("--ranks 2 --svg /nowhere/step.svg",
          {"--svg: '/nowhere/step.svg' is not a file that can be written"});
  refused("--ranks 10 --pp 2", {"384 tokens", "5 ranks"});
}

// 06 calibrated: idle shares of stages that sleep. Its figures are no test: machines are busy.
TEST(PipelineProgram, CalibratedPutsMeasuredBesideTheFormula) {
  TemporaryFolder dir;
  Output all =
      shell_of_ranks(kPrograms + "calibrated --ranks 2 --steps 1 --forward 2 --input 2 --weight 2");
  EXPECT_EQ(all.status, 0) << all.out;
  EXPECT_TRUE(all.says("2 ranks, 4 micro-batches; F, I, W: 2, 2, 2 ms")) << all.out;
  for (const std::string& schedule : schedule_names())
    EXPECT_TRUE(all.says(text("\n", schedule, " "))) << all.out;
  EXPECT_TRUE(all.says("\n1f1b              20 %      20 % ")) << all.out;  // 1/(4 + 1)
  std::string svg = dir / "sleep.svg";
  Output one =
      shell_of_ranks(kPrograms + "calibrated --ranks 2 --schedule zb-h1 --steps 1 --svg " + svg);
  EXPECT_EQ(one.status, 0) << one.out;
  EXPECT_TRUE(one.says("\nsimulated\nrank 0    F")) << one.out;
  EXPECT_NE(content_of(svg).find("measured</text>"), std::string::npos);
  Output refused = shell_of_ranks(kPrograms + "calibrated --svg " + svg);
  EXPECT_NE(refused.status, 0);
  EXPECT_TRUE(refused.says("--svg draws one --schedule")) << refused.out;
}

TEST(PipelineProgram, RunsAsProcessesOverMpi) {
  if (shell_of_ranks("command -v mpirun").status != 0) GTEST_SKIP() << "there is no mpirun here";
  Program p;
  const std::string launch = "LOCKSTEP_NO_INSTALL=1 LOCKSTEP_PROGRAMS=" LOCKSTEP_BINARY_DIR
                             " " LOCKSTEP_SOURCE_DIR "/lockstep run ";
  Output run = shell_of_ranks(launch + "06 -n 2" +
                              p.flags("--pp 2 --check --check-replicas --schedule zb-h1"));
  ASSERT_EQ(run.status, 0) << run.out;
  EXPECT_TRUE(run.says("processes over MPI")) << run.out;
  EXPECT_TRUE(run.says("check   6 steps are those of one rank")) << run.out;
  EXPECT_TRUE(run.says("idle    rank 1: ")) << run.out;
}

}  // namespace
}  // namespace lockstep
