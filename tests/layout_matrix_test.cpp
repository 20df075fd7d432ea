// Every way to hold and sum gradients gives what one rank gives: all combinations, ten steps each.
// layout_test.cpp has a selection of them for every day.

#include "tests/layout_cases.h"

namespace lockstep {
namespace {

class LayoutMatrix : public ::testing::TestWithParam<Sync> {};

TEST_P(LayoutMatrix, IsOneRankAfterTenSteps) {
  for (bool tied : {false, true}) {
    Trained one = one_rank(tied, 10);
    for (int ranks : kRanks)
      for (int accumulation : kAccumulations)
        for (Recompute recompute : kRecomputes)
          expect_one_rank({ranks, GetParam(), accumulation, recompute, tied}, one, 10);
  }
}

INSTANTIATE_TEST_SUITE_P(All, LayoutMatrix, ::testing::ValuesIn(kAllSyncs),
                         [](const auto& info) { return std::string(name_of(info.param)); });

}  // namespace
}  // namespace lockstep
