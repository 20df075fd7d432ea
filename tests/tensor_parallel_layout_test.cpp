// Tensor parallelism in every form gives the training of one rank, per tensor.

#include <set>

#include "common/checks.h"
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

// Whole heads on every rank, as many as it takes: a key/value head for each, for two or for four
// ranks of eight, or several.
TEST(TensorParallelLayout, T3_AttentionIsCutByHeadsAndFewerKeyValueHeadsAreCopied) {
  for (int64_t kv : {8, 4, 2, 1}) {
    TensorModel model{.kv_heads = kv, .biases = true};
    Trained one = one_rank(model, 5);
    for (int tp : {2, 4, 8})
      for (const Variant& variant : {kVariants[0], kVariants[1]}) {
        TensorCase c{tp, 1, variant, Sync::Bucketed, model};
        expect_one_rank(c, one, 5);
        run_threads(tp, Device::CPU, {.time_limit = 10}, [&](Communicator& world) {
          ProcessMesh mesh(world, c.shape(), kv);
          LayoutRig rig(settings_of(c), mesh);
          int64_t head = rig.settings.config.head_dim, copies = std::max<int64_t>(1, tp / kv);
          for (Parameter* p : rig.model->parameters()) {
            if (p->name.ends_with("q_proj.weight")) {
              EXPECT_EQ(p->shard.local[0], 8 / tp * head);
            }
            if (!p->name.ends_with("k_proj.weight")) continue;
            EXPECT_EQ(p->shard.local[0], std::max<int64_t>(1, kv / tp) * head);
            EXPECT_EQ(p->shard.first,
                      kv >= tp ? world.rank() * (kv / tp) * head : world.rank() / copies * head);
            EXPECT_EQ(p->sum_over.has(Axis::KvCopies), copies > 1);
          }
        });
      }
  }
}

TEST(TensorParallelLayout, ReplicasAreTheSameBitsAfterTwentySteps) {
  for (const Variant& variant : kVariants)
    for (Sync sync : kTensorSyncs)
      for (DType compute : {DType::F32, DType::BF16}) {
        TensorCase c{2, 2, variant, sync, {.kv_heads = 1, .biases = true, .dropout = true}};
        SCOPED_TRACE(c.name());
        run_threads(4, Device::CPU, {.time_limit = 20}, [&](Communicator& world) {
          ProcessMesh mesh(world, c.shape(), c.model.kv_heads);
          LayoutRig::Settings s = settings_of(c);
          s.compute = compute;
          LayoutRig rig(s, mesh);
          for (int step = 0; step < 20; ++step)
            rig.step(dealt(s.config, {mesh.here().dp, 2}, 1, step, Device::CPU, 8));
          EXPECT_NO_THROW(check_replicas({rig.model.get()}, *rig.parallel, mesh, 20));
        });
      }
}

// A block that computes again in backward communicates again, in the same order on all ranks.
TEST(TensorParallelLayout, RecomputedBlocksAreThoseOfOneRank) {
  TensorModel model{.kv_heads = 2, .dropout = true};
  Trained one = one_rank(model, 3);
  for (Recompute kind : {Recompute::Selective, Recompute::Full})
    for (const Variant& variant : kVariants) {
      SCOPED_TRACE(variant.name);
      LayoutRig::Settings s = settings_of({2, 2, variant, Sync::Zero3, model});
      s.more = [kind](Parts& parts) { use_recomputation(parts, kind); };
      Trained many = train({.dp = 2, .tp = 2}, s, 2, 3, {.time_limit = 10, .check_calls = true});
      expect_same(many, one, {.weight = 1e-5});
      EXPECT_EQ(strict_order(many.ledgers), "");
    }
}

// Parts of a sum are rounded to bf16 before they are added up. (Eight parts, each of two or three
// columns here, differ by 2.1 %.) The first step is compared: AdamW turns rounding into steps.
TEST(TensorParallelLayout, SixteenBitsStayWithinTwoPercentOfOneRank) {
  TensorModel model{.kv_heads = 2};
  LayoutRig::Settings s = settings_of({1, 1, kVariants[0], Sync::Naive, model});
  s.compute = DType::BF16;
  Trained one = train(1, s, 1, 1);
  for (const Variant& variant : kVariants)
    for (int tp : {2, 4}) {
      SCOPED_TRACE(text(variant.name, " TP", tp));
      s.tensor_parallel = variant.how;
      expect_same(train({.tp = tp}, s, 1, 1), one,
                  {.loss = 2e-2, .gradient = 2e-2, .weight = 2e-2});
    }
}

// Fresh memory is NaN: nobody reads what nobody wrote.
TEST(TensorParallelLayout, PoisonedMemoryChangesNothing) {
  for (const Variant& variant : kVariants) {
    TensorCase c{4, 2, variant, Sync::Zero3, {.kv_heads = 2, .tied = true, .biases = true}};
    Trained clean = train(c.shape(), settings_of(c), 2, 2);
    memory_account()->poison = true;
    Trained poisoned = train(c.shape(), settings_of(c), 2, 2);
    memory_account()->poison = false;
    EXPECT_EQ(poisoned.losses, clean.losses) << variant.name;
    EXPECT_EQ(poisoned.norms, clean.norms) << variant.name;
    expect_bitwise(poisoned.weights, clean.weights);
  }
}

}  // namespace
}  // namespace lockstep
