// Saving while the world ends: the process is killed, the disk is full. What is on the disk
// afterwards must be a complete checkpoint, the older one or the newer one.
//
// A writer is a forked child. It saves states that can be told apart: in the checkpoint of step n
// every master, every moment and AdamW's count hold n. It touches no GPU and starts no threads.

#include <gtest/gtest.h>
#include <signal.h>
#include <sys/resource.h>
#include <sys/wait.h>

#include <chrono>
#include <thread>

#include "tests/checkpoints.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

constexpr int64_t kFileBytes = 6000;  // many files, so that there are many moments

void fill(const Tensor& t, float value) { std::fill_n(t.data<float>(), t.size(), value); }

void fill(Rig& rig, int64_t step) {
  for (size_t i = 0; i < rig.optimizer->owned().size(); ++i) {
    fill(rig.optimizer->owned()[i].master, float(step));
    fill(rig.optimizer->moments()[i].m, float(step));
    fill(rig.optimizer->moments()[i].v, float(step));
  }
  StepState state;
  state.updates = step;
  std::memcpy(rig.optimizer->state().raw(), &state, sizeof state);
}

void save(Rig& rig, const fs::path& dir, int64_t step,
          const std::function<void(const fs::path&)>& after = {}) {
  fill(rig, step);
  save_checkpoint(dir, *rig.optimizer, rig.settings.config, {}, step,
                  {.file_bytes = kFileBytes, .keep = 2, .after = after});
}

// The step of the newest checkpoint, after a look at every number in it.
int64_t check_newest(Rig& rig, const fs::path& dir) {
  fill(rig, -1);
  int64_t step = load_checkpoint(latest_checkpoint(dir), *rig.optimizer);
  Rig expected({});
  fill(expected, step);
  EXPECT_EQ(everything(rig), everything(expected)) << "step " << step;
  return step;
}

// Runs body in a child that must not return to the test.
pid_t fork_writer(const std::function<void()>& body) {
  pid_t child = fork();
  if (child != 0) return child;
  try {
    body();
  } catch (const std::exception& e) {
    std::fprintf(stderr, "writer: %s\n", e.what());
    _exit(2);
  }
  _exit(0);
}

int wait_for(pid_t child) {
  int status = 0;
  EXPECT_EQ(waitpid(child, &status, 0), child);
  return status;
}

bool was_killed(int status) { return WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL; }

TEST(Checkpoint, Pitfall119_KilledSaveLeavesACompleteCheckpoint) {
  TemporaryFolder folder;
  const fs::path& dir = folder.path();
  Rig rig({});
  const auto begin = std::chrono::steady_clock::now();
  save(rig, dir, 1000);
  const auto one_save = std::chrono::steady_clock::now() - begin;
  int64_t last = 1000, in_the_middle = 0, finished = 0;
  const RandomStream random(uint64_t(getpid()), "moments");
  for (uint64_t round = 0; round < 30; ++round) {
    pid_t writer = fork_writer([&] {
      for (int64_t step = last + 1;; ++step) save(rig, dir, step);
    });
    // Somewhere in the next three saves, however slow the disk is.
    const fs::path until = dir / text("step_0000", last + int64_t(round % 3));
    while (!fs::exists(until)) std::this_thread::sleep_for(std::chrono::milliseconds(1));
    std::this_thread::sleep_for(one_save * int(random.at(round).x[0] % 1000) / 1000);
    ASSERT_EQ(kill(writer, SIGKILL), 0);
    ASSERT_TRUE(was_killed(wait_for(writer)));
    for (const std::string& name : names_in(dir))
      in_the_middle += name.ends_with(".partial") || name.ends_with(".trash");

    int64_t newest = check_newest(rig, dir);
    EXPECT_GE(newest, last + int64_t(round % 3)) << "round " << round;
    finished += newest - last;
    last = newest;
  }
  EXPECT_GE(finished, 30);      // ten times one and ten times two saves were waited for
  EXPECT_GT(in_the_middle, 5);  // and some others were not finished
}

// The same without luck: dies at each moment in turn, and it is known which checkpoint is left.
TEST(Checkpoint, Pitfall119_DeathBetweenAnyTwoFilesIsSurvived) {
  TemporaryFolder all;
  Rig rig({});
  for (int64_t step : {1, 2}) save(rig, all / "two", step);
  std::vector<std::string> moments;  // of the third save, which also removes the first
  fs::copy(all / "two", all / "three", fs::copy_options::recursive);
  save(rig, all / "three", 3, [&](const fs::path& p) { moments.push_back(p.filename()); });
  const auto renamed = std::find(moments.begin(), moments.end(), "step_00000003");
  ASSERT_GT(moments.end() - renamed, 1);
  ASSERT_EQ(renamed[-1], "manifest.json");
  ASSERT_EQ(renamed[1], "step_00000001.trash");
  ASSERT_GT(moments.size(), 10u);

  for (size_t death = 0; death < moments.size(); ++death) {
    SCOPED_TRACE(text("moment ", death, ": ", moments[death]));
    const fs::path dir = all / text("death", death);
    fs::copy(all / "two", dir, fs::copy_options::recursive);
    pid_t writer = fork_writer([&] {
      size_t moment = 0;
      save(rig, dir, 3, [&](const fs::path&) {
        if (moment++ == death) raise(SIGKILL);
      });
    });
    ASSERT_TRUE(was_killed(wait_for(writer)));
    bool after_rename = death >= size_t(renamed - moments.begin());
    EXPECT_EQ(check_newest(rig, dir), after_rename ? 3 : 2);
    save(rig, dir, 4);  // goes on, and cleans up
    EXPECT_EQ(check_newest(rig, dir), 4);
    EXPECT_EQ(names_in(dir),
              (std::vector<std::string>{after_rename ? "step_00000003" : "step_00000002",
                                        "step_00000004"}));
  }
}

// An error instead of a death: it is reported, and its half-written folder goes.
TEST(Checkpoint, AnErrorInTheMiddleLeavesTheOlderOneAndNothingElse) {
  TemporaryFolder folder;
  Rig rig({});
  save(rig, folder.path(), 1);
  for (int fails = 0; fails < 5; ++fails) {
    int moment = 0;
    auto after = [&](const fs::path&) { require(moment++ < fails, "the network is gone"); };
    expect_refusal([&] { save(rig, folder.path(), 2, after); }, {"the network is gone"});
    EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"step_00000001"});
  }
  EXPECT_EQ(check_newest(rig, folder.path()), 1);
}

// A disk that is full, as a limit on the size of files: the child's sentence and the files tell.
TEST(Checkpoint, FullDiskIsASentenceAndTheOlderOneStays) {
  for (rlim_t limit : {0, 100, 3000}) {
    TemporaryFolder folder;
    Rig rig({});
    save(rig, folder / "run", 1);
    pid_t writer = fork_writer([&] {
      signal(SIGXFSZ, SIG_IGN);
      rlimit most{limit, limit};
      setrlimit(RLIMIT_FSIZE, &most);
      try {
        save(rig, folder / "run", 2);
      } catch (const Error& e) {
        const std::string sentence = e.what();
        bool clear = sentence.find("cannot be written: File too large") != std::string::npos &&
                     sentence.find("step_00000002.partial/") != std::string::npos;
        _exit(clear ? 42 : 43);
      }
    });
    int status = wait_for(writer);
    ASSERT_TRUE(WIFEXITED(status));
    EXPECT_EQ(WEXITSTATUS(status), 42) << limit;
    EXPECT_EQ(names_in(folder / "run"), std::vector<std::string>{"step_00000001"});
    EXPECT_EQ(check_newest(rig, folder / "run"), 1);
  }
}

TEST(Checkpoint, AFolderThatCannotBeMadeIsNamed) {
  TemporaryFolder folder;
  Rig rig({});
  const fs::path file = folder.write("file", "in the way");
  expect_refusal([&] { save(rig, file / "run", 1); }, {"file/run", "cannot be created"});
  expect_refusal([&] { save(rig, "/proc/none/run", 1); }, {"/proc/none/run", "cannot be created"});
}

}  // namespace
}  // namespace lockstep
