// Every schedule in every layout computes what one rank computes: all combinations.
// pipeline_test.cpp has a selection of them for every day.

#include "tests/pipeline_cases.h"

namespace lockstep {
namespace {

class PipelineMatrix : public ::testing::TestWithParam<std::string> {};

TEST_P(PipelineMatrix, GradientsAreThoseWithoutAPipelineBitByBit) {
  PipelineReferences references;
  int ran = 0;
  for (bool tied : {false, true})
    for (int pp : kPipelines)
      for (int m : kMicroBatches)
        for (int dp : {1, 2})
          for (Sync sync : {Sync::Bucketed, Sync::Zero1})
            ran += references.expect_same({GetParam(), pp, m, dp, sync}, tied);
  EXPECT_GT(ran, 20);
}

TEST_P(PipelineMatrix, NoRankHangsWhoeverIsLateAtWhateverAction) {
  for (int pp : {4, 8}) expect_patience({GetParam(), pp, 2 * pp}, 1e-3);
}

INSTANTIATE_TEST_SUITE_P(All, PipelineMatrix, ::testing::ValuesIn(schedule_names()),
                         [](const auto& info) {
                           std::string name = info.param;
                           std::replace(name.begin(), name.end(), '-', '_');
                           return name;
                         });

}  // namespace
}  // namespace lockstep
