// Tokens into windows, windows into one global order, and samples of that order into batches.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <set>

#include "common/data.h"
#include "common/shards.h"
#include "tests/temporary.h"

namespace lockstep {
namespace {

// A text of which every token names its own position.
Corpus counting_corpus(const TemporaryFolder& folder, int32_t tokens, int64_t length,
                       double fraction = 0.05) {
  std::vector<int32_t> content(static_cast<size_t>(tokens));
  std::iota(content.begin(), content.end(), 0);
  write_bin(folder / "count.bin", content, kGpt2Vocab);
  return Corpus({(folder / "count.bin").string(), length, fraction});
}

TEST(Sampler, EveryEpochVisitsEveryWindowOnceInAnOrderOfItsOwn) {
  for (int64_t windows : {1, 2, 3, 5, 64, 100, 1000, 4097}) {
    Sampler sampler(windows, 3);
    std::vector<std::vector<int64_t>> epochs;
    for (int64_t epoch = 0; epoch < 3; ++epoch) {
      std::vector<int64_t> order;
      for (int64_t i = 0; i < windows; ++i) order.push_back(sampler.window(epoch * windows + i));
      std::vector<int64_t> sorted = order, expected(static_cast<size_t>(windows));
      std::sort(sorted.begin(), sorted.end());
      std::iota(expected.begin(), expected.end(), 0);
      EXPECT_EQ(sorted, expected) << windows;
      epochs.push_back(std::move(order));
    }
    if (windows >= 64) {
      EXPECT_FALSE(std::is_sorted(epochs[0].begin(), epochs[0].end()));
      EXPECT_NE(epochs[0], epochs[1]);
      EXPECT_NE(epochs[1], epochs[2]);
    }
    EXPECT_EQ(sampler.epoch(windows - 1), 0);
    EXPECT_EQ(sampler.epoch(windows), 1);
  }
}

TEST(Sampler, DependsOnTheSeedAndNothingElse) {
  Sampler a(100, 1), b(100, 1), c(100, 2);
  int same = 0;
  for (int64_t i = 250; i >= 0; --i) {  // asked in another order
    EXPECT_EQ(a.window(i), b.window(i));
    same += a.window(i) == c.window(i);
  }
  EXPECT_LT(same, 20);
  expect_refusal([&] { a.window(-1); }, {"-1"});
  expect_refusal([] { Sampler(0, 1); }, {"0 windows"});
}

// Where window w comes in an epoch is uniform: chi-squared over 2000 epochs. For k cells the
// statistic has mean k - 1 and standard deviation sqrt(2 (k - 1)).
TEST(Sampler, EveryPlaceIsEquallyLikely) {
  for (int64_t windows : {3, 10, 37}) {
    constexpr int64_t kEpochs = 2000;
    Sampler sampler(windows, 5);
    const size_t cells = size_t(windows);
    std::vector<std::vector<int64_t>> count(cells, std::vector<int64_t>(cells));
    for (int64_t e = 0; e < kEpochs; ++e)
      for (int64_t i = 0; i < windows; ++i)
        ++count[size_t(i)][size_t(sampler.window(e * windows + i))];
    double expected = double(kEpochs) / double(windows);
    for (const auto& row : count) {
      double statistic = 0;
      for (int64_t n : row) statistic += (n - expected) * (n - expected) / expected;
      EXPECT_LT(statistic, double(windows - 1) + 5 * std::sqrt(2.0 * double(windows - 1)));
    }
  }
}

TEST(Sampler, InOrderForValidation) {
  Sampler order = Sampler::in_order(3);
  EXPECT_EQ(order.window(0), 0);
  EXPECT_EQ(order.window(2), 2);
  EXPECT_EQ(order.window(3), 0);
}

// Ranks that share the samples of a step get disjoint parts of the same global order.
TEST(Sampler, RanksTogetherSeeWhatOneRankSees) {
  TemporaryFolder folder;
  Corpus corpus = counting_corpus(folder, 64 * 4 + 1 + 40, 4, 40.0 / 297);
  ASSERT_EQ(corpus.windows(Split::Train, 4), 64);
  Sampler sampler(64, 9);
  Tensor one = load(corpus, Split::Train, sampler, {0, 64}, 4).inputs;
  std::set<int32_t> all(one.data<int32_t>(), one.data<int32_t>() + one.size());
  EXPECT_EQ(all.size(), 256u);
  for (int64_t ranks : {2, 4}) {
    std::vector<int32_t> together;
    for (int64_t rank = 0; rank < ranks; ++rank) {
      int64_t each = 64 / ranks;
      Batch b = load(corpus, Split::Train, sampler, {rank * each, each}, 4);
      for (int32_t token : b.inputs.values<int32_t>()) together.push_back(token);
    }
    EXPECT_EQ(together, one.values<int32_t>());
  }
}

// ---- Batches

TEST(Batch, HoldsWindowsWithTargetsOneFurther) {
  TemporaryFolder folder;
  Corpus corpus = counting_corpus(folder, 100, 3);
  Sampler sampler(corpus.windows(Split::Train, 3), 2);
  Batch b = load(corpus, Split::Train, sampler, {30, 2}, 3);
  EXPECT_EQ(b.sequences, 2);
  EXPECT_EQ(b.length, 3);
  EXPECT_EQ(b.valid, 6);
  int32_t x = int32_t(3 * sampler.window(30)), y = int32_t(3 * sampler.window(31));
  using Ints = std::vector<int32_t>;
  EXPECT_EQ(b.inputs.values<int32_t>(), (Ints{x, x + 1, x + 2, y, y + 1, y + 2}));
  EXPECT_EQ(b.targets.values<int32_t>(), (Ints{x + 1, x + 2, x + 3, y + 1, y + 2, y + 3}));
  EXPECT_EQ(b.positions.values<int32_t>(), (Ints{0, 1, 2, 0, 1, 2}));
  EXPECT_EQ(b.rows.values<int64_t>(), (std::vector<int64_t>{90, 91, 92, 93, 94, 95}));
}

TEST(Batch, HoldsOnlyTheGivenPositions) {
  TemporaryFolder folder;
  Corpus corpus = counting_corpus(folder, 100, 4);
  Sampler order = Sampler::in_order(corpus.windows(Split::Train, 4));
  Batch b = load(corpus, Split::Train, order, {1, 2}, 4, {0, 3});
  using Ints = std::vector<int32_t>;
  EXPECT_EQ(b.length, 2);
  EXPECT_EQ(b.inputs.values<int32_t>(), (Ints{4, 7, 8, 11}));
  EXPECT_EQ(b.targets.values<int32_t>(), (Ints{5, 8, 9, 12}));
  EXPECT_EQ(b.positions.values<int32_t>(), (Ints{0, 3, 0, 3}));
  EXPECT_EQ(b.rows.values<int64_t>(), (std::vector<int64_t>{4, 7, 8, 11}));
  expect_refusal([&] { load(corpus, Split::Train, order, {0, 1}, 4, {4}); }, {"position 4"});
  expect_refusal([&] { load(corpus, Split::Train, order, {0, 1}, 8); }, {"fills only"});
  EXPECT_EQ(load(corpus, Split::Train, order, {0, 0}, 4).inputs.size(), 0);  // a rank without work
}

}  // namespace
}  // namespace lockstep
