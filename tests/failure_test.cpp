// What happens to a run when one rank does not do what the others do. Real programs, as threads and
// under the real mpirun: every process ends in time, not with success, and says which rank and
// which operation it was.

#include <gtest/gtest.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <filesystem>
#include <thread>

#include "tests/temporary.h"

namespace lockstep {
namespace {

constexpr bool kHasMpi = LOCKSTEP_BUILT_WITH_MPI;
constexpr double kTimeLimit = 1;  // of failing_rank.cpp, where one hangs; others end sooner
const std::string kPrograms = LOCKSTEP_BINARY_DIR "/tests/";
const std::string kMpirun =
    "LOCKSTEP_PROGRAMS=" LOCKSTEP_BINARY_DIR " " LOCKSTEP_SOURCE_DIR "/lockstep mpirun -n ";
const std::vector<std::string> kOperations = {
    "all_reduce", "reduce",     "broadcast", "all_gather", "reduce_scatter", "gather",
    "scatter",    "all_to_all", "exchange",  "barrier",    "split"};

// A command that runs while others do.
class Running {
 public:
  explicit Running(const std::string& command)
      : command_(command), pipe_(popen(("timeout 60 env " + command + " 2>&1").c_str(), "r")) {}
  void finish() {
    char buffer[4096];
    while (size_t n = fread(buffer, 1, sizeof buffer, pipe_)) out.append(buffer, n);
    int ended = pclose(pipe_);
    status = WIFEXITED(ended) ? WEXITSTATUS(ended) : 128 + WTERMSIG(ended);
    seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start_).count();
  }
  bool says(const std::string& words) const { return out.find(words) != std::string::npos; }
  std::string report() const {
    return text("'", command_, "' ended with ", status, " after ", seconds, " s:\n", out);
  }
  std::string out;
  int status = -1;
  double seconds = 0;

 private:
  std::string command_;
  FILE* pipe_;
  std::chrono::steady_clock::time_point start_ = std::chrono::steady_clock::now();
};

Running run(const std::string& command) {
  Running r(command);
  r.finish();
  return r;
}

int processes_with(const std::string& tag) {
  int found = 0;
  for (const auto& entry : std::filesystem::directory_iterator("/proc"))
    found += content_of(entry.path() / "cmdline").find(tag) != std::string::npos;
  return found;
}

std::string command_of(const std::string& how, const std::string& operation, bool processes) {
  std::string program = kPrograms + "failing_rank " + how + " " + operation;
  return processes ? kMpirun + "4 " + program + " 1" : program + " 4";
}

// Four ranks, of which rank 2 fails in its way in each of the operations; a few runs at a time.
void expect_ends(const std::string& how, bool processes) {
  if (processes && !kHasMpi) return;
  std::string tag = text("failure_test_", getpid(), "_", how);
  size_t at_once = processes ? 3 : 6;
  for (size_t first = 0; first < kOperations.size(); first += at_once) {
    std::vector<Running> runs;
    std::vector<std::string> operations(
        kOperations.begin() + int64_t(first),
        kOperations.begin() + int64_t(std::min(first + at_once, kOperations.size())));
    for (const std::string& op : operations)
      runs.emplace_back(command_of(how, op, processes) + " " + tag);
    for (size_t i = 0; i < runs.size(); ++i) {
      Running& r = runs[i];
      r.finish();
      EXPECT_NE(r.status, 0) << r.report();
      EXPECT_NE(r.status, 124) << "had to be stopped: " << r.report();
      EXPECT_LT(r.seconds, kTimeLimit + 5) << r.report();
      EXPECT_TRUE(r.says("rank 2")) << r.report();
      EXPECT_FALSE(r.says("done")) << r.report();
      // Who sends and does not wait gets as far as the last barrier. The ledger, which an aborting
      // rank names, knows no split.
      bool named = r.says(operations[i] + " (") || r.says(operations[i] + " in \"world\"") ||
                   r.says("barrier (") || operations[i] == "split";
      EXPECT_TRUE(named) << operations[i] << ": " << r.report();
    }
  }
  for (int i = 0; i < 20 && processes_with(tag) > 0; ++i)
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
  EXPECT_EQ(processes_with(tag), 0) << "processes are left";
}

TEST(Failure, Pitfall122_ThreadThatThrows) { expect_ends("throw", false); }
TEST(Failure, Pitfall122_ThreadThatAborts) { expect_ends("abort", false); }
TEST(Failure, Pitfall122_ThreadThatHangs) { expect_ends("hang", false); }
TEST(Failure, Pitfall122_ProcessThatThrows) { expect_ends("throw", true); }
TEST(Failure, Pitfall122_ProcessThatAborts) { expect_ends("abort", true); }
TEST(Failure, Pitfall122_ProcessThatIsKilled) { expect_ends("kill", true); }
TEST(Failure, Pitfall122_ProcessThatHangs) { expect_ends("hang", true); }

TEST(Failure, RankThatExitsEndsTheOthers) {
  for (bool processes : {false, kHasMpi}) {
    Running r = run(command_of("exit", "all_reduce", processes));
    EXPECT_NE(r.status, 0) << r.report();
    EXPECT_LT(r.seconds, 6) << r.report();
    EXPECT_TRUE(r.says("rank 2 called exit()")) << r.report();
  }
}

TEST(Failure, RankThatThrowsIsNamedWithItsSentenceAndPlace) {
  Running r = run(command_of("throw", "all_reduce", false));
  EXPECT_EQ(r.status, 1);
  EXPECT_TRUE(r.says("error: rank 2: does not feel well (last operation: all_reduce in \"world\")"))
      << r.report();
  EXPECT_TRUE(r.says("failing_rank.cpp:")) << r.report();
  EXPECT_EQ(r.out.find("error: "), r.out.rfind("error: ")) << "one error only: " << r.report();
}

TEST(Failure, LagBelowTheLimitIsNoFailure) {
  for (bool processes : {false, kHasMpi}) {
    Running r = run(command_of("lag", "all_reduce", processes));
    EXPECT_EQ(r.status, 0) << r.report();
    EXPECT_TRUE(r.says("done")) << r.report();
  }
}

TEST(Failure, Pitfall126_DifferentCountsAreFoundBeforeTheyAreUsed) {
  for (bool processes : {false, kHasMpi}) {
    Running r = run(command_of("mismatch", "all_reduce", processes));
    EXPECT_NE(r.status, 0) << r.report();
    EXPECT_LT(r.seconds, 10) << r.report();
    for (const char* words : {"all_reduce", "rank 0", "rank 2"})
      EXPECT_TRUE(r.says(words)) << r.report();
    EXPECT_TRUE(r.says("409600") || r.says(text(4 * 409600))) << r.report();
    EXPECT_TRUE(r.says("409598") || r.says(text(4 * 409598))) << r.report();
  }
}

TEST(Failure, Pitfall129_CoresPerRankAndTooManyThreads) {
  std::string program = "taskset -c 0 " + kPrograms + "failing_rank none all_reduce ";
  Running one = run("OMP_NUM_THREADS=2 " + program + "1");
  EXPECT_TRUE(one.says("ranks   1 (this process), 1 core each")) << one.report();
  EXPECT_TRUE(one.says("warning: 2 OpenMP threads per rank, but only 1 core")) << one.report();
  Running fits = run("OMP_NUM_THREADS=1 " + program + "1");
  EXPECT_FALSE(fits.says("warning")) << fits.report();
  if (!kHasMpi) return;
  Running two = run("OMP_NUM_THREADS=2 " + kMpirun + "2 " + program + "1");
  EXPECT_TRUE(two.says("ranks   2 processes over MPI, 1 core each")) << two.report();
  EXPECT_TRUE(two.says("warning: 2 OpenMP threads per rank, but only 1 core")) << two.report();
}

// The launcher of another MPI: every process believes that it is alone.
TEST(Failure, Pitfall133_ForeignLauncherIsRefused) {
  for (const char* name : {"PMI_SIZE", "OMPI_COMM_WORLD_SIZE", "SLURM_STEP_NUM_TASKS"})
    for (const char* program : {"failing_rank", "failing_rank_without_mpi"}) {
      Running r = run(text(name, "=4 ", kPrograms, program, " none all_reduce 1"));
      EXPECT_EQ(r.status, 1) << r.report();
      EXPECT_EQ(std::count(r.out.begin(), r.out.end(), '\n'), 1) << r.report();
      EXPECT_TRUE(r.says("the launcher says that it started 4 processes")) << r.report();
      bool why = r.says("MPI sees 1") || r.says("built without MPI");
      EXPECT_TRUE(why && r.says("--ranks 4")) << r.report();
    }
  Running both = run(text("PMI_SIZE=4 ", kPrograms, "failing_rank none all_reduce 3"));
  EXPECT_TRUE(both.status == 1 && both.says("--ranks 3")) << both.report();
}

TEST(Failure, Pitfall134_RunsWithoutMpirunAndWithoutMpi) {
  for (const char* program : {"failing_rank", "failing_rank_without_mpi"})
    for (int ranks : {1, 3}) {
      Running r = run(text(kPrograms, program, " none all_reduce ", ranks));
      EXPECT_EQ(r.status, 0) << r.report();
      EXPECT_TRUE(r.says("done")) << r.report();
      EXPECT_TRUE(r.says(text("ranks   ", ranks, " "))) << r.report();
    }
}

TEST(Failure, Pitfall135_TestThatFailsOnRank1Only) {
  if (!kHasMpi) GTEST_SKIP() << "built without MPI";
  for (const char* name : {"Rank1.FailsAlone", "Rank1.LeavesTheOthersWaiting"}) {
    Running r = run(text(kMpirun, "3 ", kPrograms, "rank_1_fails --gtest_filter=", name));
    EXPECT_NE(r.status, 0) << r.report();
    EXPECT_LT(r.seconds, 20) << r.report();
    EXPECT_TRUE(r.says("rank 1: ")) << r.report();
    EXPECT_TRUE(r.says(text(name, " failed on rank(s)"))) << r.report();
  }
}

}  // namespace
}  // namespace lockstep
