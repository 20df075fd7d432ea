// The promise of the README: two cores and two minutes are enough to learn from real text.

#include <gtest/gtest.h>

#include <chrono>
#include <cstdio>
#include <string>

namespace lockstep {
namespace {

// Less than half of the default run, whose cosine then ends earlier. A byte that is drawn at random
// costs ln 256 = 5.5 nats; knowing only how often each occurs leaves about 3.4.
TEST(Learning, DefaultCorpusBelowTwoNatsPerByteWithinTwoMinutes) {
  auto begin = std::chrono::steady_clock::now();
  FILE* pipe = popen(LOCKSTEP_BINARY_DIR
                     "/01_single_gpu/train --device cpu --steps 250 --evaluate-every 0 --sample 40",
                     "r");
  std::string last;
  char line[1024];
  while (fgets(line, sizeof line, pipe)) last = line;
  EXPECT_EQ(pclose(pipe), 0);
  double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  ASSERT_EQ(last.rfind("validation loss ", 0), 0u) << last;
  EXPECT_LT(std::stod(last.substr(16)), 2.0);
  EXPECT_LT(seconds, 120);
}

}  // namespace
}  // namespace lockstep
