// Tensor parallelism in every form gives the training of one rank, per tensor.

#include <set>

#include "common/checks.h"
#include "tests/checkpoints.h"
#include "tests/tensor_parallel_cases.h"

namespace lockstep {
namespace {

// Of all combinations (tensor_parallel_matrix_test.cpp), so many that any two choices meet.
std::vector<TensorCase> pairwise() {
  std::vector<TensorCase> selection;
  size_t n = 0;
  for (size_t t = 0; t < 4; ++t)
    for (size_t v = 0; v < 4; ++v, ++n)
      selection.push_back({kTP[t], kDP[(t + v / 2) % 2], kVariants[v], kTensorSyncs[(t + v) % 3],
                           model_number((n * 3 + n / 4) % kModels)});
  return selection;
}

TEST(TensorParallelLayout, AnyTwoChoicesMeetInTheSelection) {
  std::set<std::array<int, 4>> met;
  auto variant = [](const TensorCase& c) {
    return int(c.variant.how.sequence_parallel) + int(c.variant.how.gather_again) +
           c.variant.how.overlap;
  };
  for (const TensorCase& c : pairwise()) {
    int choices[] = {
        c.tp,         c.dp,           variant(c),     int(c.sync), int(c.model.kv_heads),
        c.model.tied, c.model.biases, c.model.dropout};
    for (int i = 0; i < 8; ++i)
      for (int j = 0; j < i; ++j) met.insert({i, j, choices[i], choices[j]});
  }
  constexpr size_t kChoices[] = {4, 2, 4, 3, 2, 2, 2, 2};
  size_t pairs = 0;
  for (size_t i = 0; i < 8; ++i)
    for (size_t j = 0; j < i; ++j) pairs += kChoices[i] * kChoices[j];
  EXPECT_EQ(met.size(), pairs);
}

TEST(TensorParallelLayout, LossesGradientsAndStepsAreThoseOfOneRank) {
  std::map<std::string, Trained> ones;
  for (const TensorCase& c : pairwise()) {
    Trained& one = ones[c.model.name()];
    if (one.losses.empty()) one = one_rank(c.model, 5);
    expect_one_rank(c, one, 5);
  }
}

}  // namespace
}  // namespace lockstep
