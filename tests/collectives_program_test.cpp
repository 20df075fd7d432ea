// The programs of chapter 02 as a newcomer starts them.

#include <gtest/gtest.h>
#include <unistd.h>

#include <cstdio>
#include <sstream>

#include "tests/shell.h"

namespace lockstep {
namespace {

const std::string kChapter = LOCKSTEP_BINARY_DIR "/02_data_parallel/";

TEST(CollectivesProgram, ShowsEveryOperationBeforeAndAfter) {
  Output out = shell(kChapter + "collectives --ranks 3");
  EXPECT_EQ(out.status, 0) << out.out;
  for (const char* name : {"broadcast", "reduce", "all_reduce", "gather", "all_gather", "scatter",
                           "reduce_scatter", "all_to_all", "send_receive", "ring", "barrier"})
    EXPECT_TRUE(out.says(std::string("\n") + name + ": ")) << name;
  EXPECT_TRUE(out.says("after  rank 2  [36, 288]"));
  EXPECT_TRUE(out.says("after  rank 1  [6, 6, 6, 6, 6]"));
  Output none = shell(kChapter + "collectives --only everything");
  EXPECT_EQ(none.status, 1);
  EXPECT_TRUE(none.says("everything is no operation")) << none.out;
}

TEST(CollectivesProgram, C16_BandwidthHasMedianAndPercentiles) {
  TemporaryFolder dir;
  std::string csv = dir / "bw.csv", svg = dir / "bw.svg";
  Output out =
      shell(kChapter + "bandwidth --ranks 2 --smallest 1024 --largest 4096 --runs 5 --csv " + csv +
            " --svg " + svg);
  EXPECT_EQ(out.status, 0) << out.out;
  std::istringstream lines(content_of(csv));
  std::string line;
  std::getline(lines, line);
  EXPECT_EQ(line, "operation,bytes,median_s,p5_s,p95_s,algorithm_GBps,bus_GBps");
  int rows = 0;
  for (; std::getline(lines, line); ++rows) {
    std::istringstream cells(line);
    std::string name, cell;
    std::getline(cells, name, ',');
    std::vector<double> x;
    while (std::getline(cells, cell, ',')) x.push_back(std::stod(cell));
    ASSERT_EQ(x.size(), 6u) << line;
    EXPECT_LE(x[2], x[1]) << line;  // p5 <= median <= p95
    EXPECT_LE(x[1], x[3]) << line;
    EXPECT_NEAR(x[4] * x[1] * 1e9, x[0], 0.01 * x[0]) << line;
    EXPECT_NEAR(x[5],
                x[4] * (name.find("all_") == 0 && name != "all_reduce" ? 0.5
                        : name == "reduce_scatter"                     ? 0.5
                                                                       : 1.0),
                0.01 * x[4])
        << line;
  }
  EXPECT_EQ(rows, 8 * 2);
  EXPECT_NE(content_of(svg).find("</svg>"), std::string::npos);
}

// As root, with more ranks than cores, in a container: the launcher's line works, and shows how.
TEST(CollectivesProgram, Pitfall128_LauncherFindsTheOptionsThatWorkHere) {
  Output mpirun = shell("command -v mpirun");
  if (mpirun.status != 0) GTEST_SKIP() << "there is no mpirun here";
  Output out = shell("LOCKSTEP_PROGRAMS=" LOCKSTEP_BINARY_DIR " " LOCKSTEP_SOURCE_DIR
                     "/lockstep run 02 collectives -n 4 --only all_reduce");
  EXPECT_EQ(out.status, 0) << out.out;
  EXPECT_TRUE(out.says("mpirun -n 4")) << out.out;
  EXPECT_TRUE(out.says("--oversubscribe")) << out.out;
  EXPECT_EQ(out.says("--allow-run-as-root"), getuid() == 0) << out.out;
  EXPECT_TRUE(out.says("after  rank 3  [10, 10, 10, 10, 10]")) << out.out;
  std::string page = content_of(LOCKSTEP_SOURCE_DIR "/02_data_parallel/README.md");
  for (const char* message : {"not enough slots", "attempt to run as root", "Read -1, expected"})
    EXPECT_NE(page.find(message), std::string::npos) << message;
}

}  // namespace
}  // namespace lockstep
