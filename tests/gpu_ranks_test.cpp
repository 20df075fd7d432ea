// Who gets which GPU, and what is said when there are too few: no GPU is needed to test that.

#include "common/gpu_ranks.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <mutex>

#include "common/device.h"
#include "common/ranks.h"

namespace lockstep {
namespace {

void expect_words(const std::string& sentence, const std::vector<std::string>& words) {
  for (const std::string& word : words)
    EXPECT_NE(sentence.find(word), std::string::npos) << word << " is not in: " << sentence;
}

TEST(GpuRanks, Pitfall123_MoreRanksThanGpusAreToldTheWaysOut) {
  EXPECT_EQ(too_many_ranks(1, 1, nullptr), "");
  EXPECT_EQ(too_many_ranks(2, 2, "a"), "");
  EXPECT_EQ(too_many_ranks(3, 8, nullptr), "");
  std::string four_on_one = too_many_ranks(4, 1, nullptr);
  expect_words(four_on_one, {"4 ranks on this machine", "1 GPU,", "--ranks 4", "--device cpu",
                             "set of 1 ranks an NCCL_HOSTID"});
  expect_words(too_many_ranks(4, 2, "x7"), {"4 ranks with NCCL_HOSTID=x7", "2 GPUs,"});
  EXPECT_EQ(std::count(four_on_one.begin(), four_on_one.end(), '\n'), 0);
}

// On a machine without a GPU all ranks learn that; on one with GPUs, that there are too few.
TEST(GpuRanks, AllRanksFailTogetherAndAlike) {
  int ranks = device::count() + 3;
  std::mutex mutex;
  std::vector<std::string> sentences;
  run_threads(ranks, Device::CPU, {}, [&](Communicator& world) {
    std::string sentence = "nothing";
    try {
      start_gpu_ranks(world, 0, nullptr, std::make_shared<Ledger>(), {});
    } catch (const Error& e) {
      sentence = e.what();
    }
    std::lock_guard lock(mutex);
    sentences.push_back(sentence);
  });
  ASSERT_EQ(sentences.size(), size_t(ranks));
  for (const std::string& sentence : sentences) EXPECT_EQ(sentence, sentences[0]);
  expect_words(sentences[0], {device::available() ? text(ranks, " ranks on this machine")
                                                  : "ranks that talk over NCCL need a GPU each"});
}

// One machine out of two: only its ranks have a problem, but nobody is left waiting. The machines
// are made up, so this needs GPUs enough for the smaller one.
TEST(GpuRanks, OneMachineWithTooFewStopsAll) {
  int few = device::count();
  if (!device::available()) GTEST_SKIP() << "no GPU";
  int stopped = 0;
  std::mutex mutex;
  run_threads(2 * few + 1, Device::CPU, {}, [&](Communicator& world) {
    try {
      start_gpu_ranks(world, world.rank() < few ? 0 : 1, nullptr, std::make_shared<Ledger>(), {});
    } catch (const Error& e) {
      std::lock_guard lock(mutex);
      stopped += std::string(e.what()).find(text(few + 1, " ranks on this")) == 0;
    }
  });
  EXPECT_EQ(stopped, 2 * few + 1);
}

}  // namespace
}  // namespace lockstep
