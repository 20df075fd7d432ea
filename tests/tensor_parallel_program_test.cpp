// 04's program as its user meets it: as threads and as processes, with its own checks, with
// checkpoints, and with flags that are wrong.

#include <gtest/gtest.h>

#include <map>
#include <sstream>

#include "tests/shell.h"

namespace lockstep {
namespace {

const std::string kProgram = LOCKSTEP_BINARY_DIR "/04_tensor_parallel/train";

struct Program : SmallRun {
  Program()
      : SmallRun({{"layers", 2},
                  {"hidden", 24},
                  {"heads", 6},
                  {"kv-heads", 2},
                  {"batch-tokens", 16 * 12},
                  {"steps", 4}}) {}
  Output run(const std::string& more) const { return shell_of_ranks(kProgram + flags(more)); }
};

TEST(TensorParallelProgram, EveryVariantPassesItsOwnChecks) {
  Program p;
  for (const char* flags : {"--ranks 2 --tp 2", "--ranks 2 --tp 2 --sequence-parallel",
                            "--ranks 2 --tp 2 --sequence-parallel --overlap 2",
                            "--ranks 2 --tp 2 --sequence-parallel --gather-again --recompute full",
                            "--ranks 4 --tp 2 --stage 3 --sequence-parallel --tied --dropout 0.1",
                            "--ranks 6 --tp 6 --stage 1", "--ranks 2 --tp 1 --stage 2", "--tp 1"}) {
    Output run = p.run(std::string("--check --check-replicas ") + flags);
    EXPECT_EQ(run.status, 0) << flags << run.out;
    EXPECT_TRUE(run.says("check   4 steps are those of one rank")) << flags << run.out;
    EXPECT_TRUE(run.says("\nvalidation loss ")) << run.out;
    EXPECT_TRUE(run.says("\nshapes  ")) << run.out;
    EXPECT_EQ(run.out.find("step 1/"), run.out.rfind("step 1/")) << run.out;  // one rank speaks
  }
}

// 2 sequences of 16 tokens; 6 heads and 2 key/value heads of 4, ffn 31, 256 bytes.
TEST(TensorParallelProgram, T6_PrintsTheShapesOfEveryRegion) {
  Program p;
  auto shapes = [&](const std::string& flags) {
    Output run = p.run("--dry-run --ranks 2 --tp 2 " + flags);
    EXPECT_EQ(run.status, 0) << run.out;
    EXPECT_FALSE(run.says("step 1/")) << run.out;
    std::map<std::string, std::string> found;
    std::istringstream lines(run.out);
    for (std::string line; std::getline(lines, line);) {
      if (!line.starts_with("shapes  ")) continue;
      std::string size = line.substr(31);
      size.erase(0, size.find_first_not_of(' '));
      found[line.substr(8, line.find("  ", 8) - 8)] = size;
    }
    return found;
  };
  std::map<std::string, std::string> want = {
      {"stream, norms", "32 x 24"}, {"q|k|v", "32 x 20"},
      {"attention", "32 x 12"},     {"o, back in the stream", "32 x 24"},
      {"gate|up", "32 x 32"},       {"down, in the stream", "32 x 24"},
      {"logits", "32 x 128"}};
  EXPECT_EQ(shapes(""), want);
  for (const char* region : {"stream, norms", "o, back in the stream", "down, in the stream"})
    want[region] = "16 x 24";
  EXPECT_EQ(shapes("--sequence-parallel"), want);
}

TEST(TensorParallelProgram, GoesOnInAnotherLayoutAndExportsTheSameModel) {
  Program p;
  auto run = [&](const std::string& flags) {
    Output out = p.run(flags);
    EXPECT_EQ(out.status, 0) << flags << out.out;
    return out;
  };
  run(text("--ranks 4 --tp 2 --sequence-parallel --stage 1 --stop-after 2 --checkpoint ",
           p.at("run")));
  std::filesystem::copy(p.at("run"), p.at("run2"), std::filesystem::copy_options::recursive);
  Output one = run(text("--tp 1 --resume --checkpoint ", p.at("run"), " --export ", p.at("a")));
  Output six =
      run(text("--ranks 6 --tp 6 --resume --checkpoint ", p.at("run2"), " --export ", p.at("b")));
  EXPECT_TRUE(six.says("2 of 4 steps are done")) << six.out;
  auto last_loss = [](const Output& o) { return o.out.substr(o.out.rfind("validation loss ")); };
  EXPECT_EQ(last_loss(one), last_loss(six));
  EXPECT_EQ(content_of(p.folder / "a/config.json"), content_of(p.folder / "b/config.json"));
  EXPECT_EQ(content_of(p.folder / "a/model.safetensors").size(),
            content_of(p.folder / "b/model.safetensors").size());
}

// One sentence, before any work, and a non-zero exit; a dry run refuses the same.
TEST(TensorParallelProgram, RefusesWhatCannotWork) {
  Program p;
  auto refused = [&](const std::string& flags, const std::vector<std::string>& parts) {
    for (const char* more : {"", " --dry-run"}) {
      Output run = p.run(flags + more);
      EXPECT_EQ(run.status, 1) << flags << run.out;
      size_t error = run.out.find("error: ");
      ASSERT_NE(error, std::string::npos) << flags << run.out;
      EXPECT_EQ(run.out.find('\n', error), run.out.size() - 1) << run.out;
      EXPECT_FALSE(run.says("step 1/")) << run.out;
      EXPECT_FALSE(run.says("shapes ")) << run.out;
      for (const std::string& part : parts) EXPECT_TRUE(run.says(part)) << run.out << part;
    }
  };
  refused("--ranks 4 --tp 4", {"6 heads", "TP4", "1, 2, 3, 6"});
  refused("--ranks 2 --tp 2 --heads 6 --kv-heads 3", {"3 key/value heads", "TP2"});
  refused("--ranks 3 --tp 2", {"--tp 2", "3 ranks"});
  refused("--ranks 2 --tp 2 --sequence 15 --batch-tokens 180 --sequence-parallel",
          {"15 tokens", "TP2"});
  refused("--ranks 2 --tp 2 --overlap 4", {"sequence parallelism"});
  refused("--ranks 2 --tp 2 --gather-again", {"sequence parallelism"});
  refused("--ranks 2 --tp 2 --sequence-parallel --gather-again --overlap 2", {"overlap"});
  refused("--ranks 2 --tp 0", {"--tp"});
  refused("--ranks 2 --tp 2 --sequence-parallel --overlap 65", {"--overlap"});
  refused("--ranks 2 --tp 2 --stage 4", {"--stage", "4"});
  refused("--ranks 4 --tp 2 --micro-batch 5", {"192 tokens", "2 ranks"});
}

TEST(TensorParallelProgram, RunsAsProcessesOverMpi) {
  if (shell_of_ranks("command -v mpirun").status != 0) GTEST_SKIP() << "there is no mpirun here";
  Program p;
  Output run =
      shell_of_ranks("LOCKSTEP_NO_INSTALL=1 LOCKSTEP_PROGRAMS=" LOCKSTEP_BINARY_DIR
                     " " LOCKSTEP_SOURCE_DIR "/lockstep run 04 -n 2" +
                     p.flags("--tp 2 --sequence-parallel --overlap 2 --check --check-replicas"));
  ASSERT_EQ(run.status, 0) << run.out;
  EXPECT_TRUE(run.says("processes over MPI")) << run.out;
  EXPECT_TRUE(run.says("check   4 steps are those of one rank")) << run.out;
}

}  // namespace
}  // namespace lockstep
