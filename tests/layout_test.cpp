// Every way to hold and sum gradients gives those of one rank, per tensor.

#include <set>

#include "tests/layout_cases.h"

namespace lockstep {
namespace {

// Of all combinations (layout_matrix_test.cpp), so many that any two choices meet.
std::vector<LayoutCase> pairwise() {
  std::vector<LayoutCase> selection;
  for (size_t d = 0; d < std::size(kRanks); ++d)
    for (size_t s = 0; s < std::size(kAllSyncs); ++s)
      selection.push_back({kRanks[d], kAllSyncs[s], kAccumulations[(d + s / 2) % 2],
                           kRecomputes[(d + s) % 3], (d / 2 + s) % 2 == 1});
  return selection;
}

TEST(Layout, AnyTwoChoicesMeetInTheSelection) {
  std::set<std::array<int, 4>> met;  // which two choices, and what they are
  for (const LayoutCase& c : pairwise()) {
    std::array<int, 5> choices = {c.ranks, int(c.sync), c.accumulation, int(c.recompute), c.tied};
    for (int i = 0; i < 5; ++i)
      for (int j = 0; j < i; ++j) met.insert({i, j, choices[size_t(i)], choices[size_t(j)]});
  }
  constexpr size_t kChoices[] = {5, 6, 2, 3, 2};
  size_t pairs = 0;
  for (size_t i = 0; i < 5; ++i)
    for (size_t j = 0; j < i; ++j) pairs += kChoices[i] * kChoices[j];
  EXPECT_EQ(met.size(), pairs);
}

TEST(Layout, Z9_LossesGradientsAndTenStepsAreThoseOfOneRank) {
  Trained one[] = {one_rank(false, 10), one_rank(true, 10)};
  for (const LayoutCase& c : pairwise()) expect_one_rank(c, one[c.tied], 10);
}

// bf16 keeps three digits. A run's first step is compared: AdamW turns rounding of small gradients
// into whole steps, as it does on one rank (tests/README.md).
TEST(Layout, SixteenBitsStayWithinTwoPercentOfOneRank) {
  for (DType gradients : {DType::F32, DType::BF16}) {
    LayoutRig::Settings s = settings_of({1, Sync::Naive, 1, Recompute::None, false});
    s.compute = DType::BF16;
    Trained one = train(1, s, 1, 1);
    s.parallel.gradients = gradients;
    for (int ranks : {2, 4})
      for (Sync sync : kAllSyncs)
        for (int accumulation : kAccumulations) {
          SCOPED_TRACE(text(name_of(gradients), " gradients, DP", ranks, " ", name_of(sync), " ",
                            accumulation));
          s.sync = sync;
          expect_same(train(ranks, s, accumulation, 1), one,
                      {.loss = 2e-2, .gradient = 2e-2, .weight = 2e-2});
        }
  }
}

// Sums add in rank order, element by element: it does not matter which elements travel together,
// or when.
TEST(Layout, SumsAreTheSameBitsInEveryStrategy) {
  for (DType compute : {DType::F32, DType::BF16})
    for (int ranks : {2, 3, 4, 8})
      for (bool tied : {false, true}) {
        LayoutRig::Settings s = settings_of({ranks, Sync::Naive, 1, Recompute::None, tied});
        s.compute = compute;
        Trained naive = train(ranks, s, 1, 1);
        for (Sync sync : kAllSyncs) {
          SCOPED_TRACE(text(name_of(compute), " DP", ranks, " ", name_of(sync), tied));
          s.sync = sync;
          Trained run = train(ranks, s, 1, 1);
          EXPECT_EQ(run.losses, naive.losses);
          expect_bitwise(run.gradients, naive.gradients);
          expect_bitwise(run.weights, naive.weights);
        }
      }
}

// With accumulation there are two orders: first over a rank's micro-batches and then over ranks
// (what sums once a step), or the other way round (what sums in every micro-batch).
TEST(Layout, AccumulationHasTwoOrdersOfAdding) {
  for (int ranks : {2, 4}) {
    LayoutRig::Settings s = settings_of({ranks, Sync::Naive, 3, Recompute::None, true});
    auto gradients = [&](Sync sync) {
      s.sync = sync;
      return train(ranks, s, 3, 1).gradients;
    };
    Tensors once = gradients(Sync::Naive), each = gradients(Sync::Zero2);
    for (Sync sync : {Sync::Overlapped, Sync::Bucketed, Sync::Zero1})
      expect_bitwise(gradients(sync), once);
    expect_bitwise(gradients(Sync::Zero3), each);
    for (const auto& [name, g] : once) EXPECT_LE(relative_error(each.at(name), g), 1e-6) << name;
    EXPECT_NE(each, once);  // or the two orders would not be two
  }
}

// The values that this rank computes with, whatever the strategy keeps between steps.
uint64_t hash_of_values(LayoutRig& rig) {
  uint64_t hash = 0xcbf29ce484222325ull;
  for (Unit* unit : rig.model->units()) {
    rig.parallel->acquire(*unit, DataParallel::Pass::Evaluation);
    for (const Weights& group : unit->groups)
      for (Parameter* p : group)
        for (int64_t i = 0; i < p->value.bytes(); ++i)
          hash = (hash ^ uint64_t(p->value.raw()[i])) * 0x100000001b3ull;
    rig.parallel->release(*unit, DataParallel::Pass::Evaluation);
  }
  return hash;
}

TEST(Layout, D1_ReplicasAreTheSameBitsForTwentySteps) {
  constexpr int kSteps = 20;
  for (DType compute : {DType::F32, DType::BF16})
    for (int ranks : {2, 3, 4})
      for (Sync sync : kAllSyncs) {
        LayoutRig::Settings s = settings_of({ranks, sync, 1, Recompute::None, false});
        s.compute = compute;
        using Hashes = std::vector<uint64_t>;  // of each step
        std::vector<Hashes> hashes{size_t(ranks), Hashes(kSteps)};
        run_threads(ranks, Device::CPU, {}, [&](Communicator& world) {
          ProcessMesh mesh(world, {.dp = ranks});
          LayoutRig rig(s, mesh);
          for (int step = 0; step < kSteps; ++step) {
            rig.step(dealt(s.config, {world.rank(), ranks}, 1, step));
            hashes[size_t(world.rank())][size_t(step)] = hash_of_values(rig);
          }
        });
        for (int r = 1; r < ranks; ++r)
          EXPECT_EQ(hashes[size_t(r)], hashes[0]) << name_of(sync) << ", rank " << r;
        EXPECT_EQ(std::set<uint64_t>(hashes[0].begin(), hashes[0].end()).size(), size_t(kSteps));
      }
}

// Fresh memory is NaN: nobody reads what nobody wrote, padding of shards included.
TEST(Layout, PoisonedMemoryChangesNothing) {
  for (Sync sync : kAllSyncs) {
    LayoutRig::Settings s = settings_of({3, sync, 3, Recompute::Full, true});
    s.compute = DType::BF16;
    Trained clean = train(3, s, 3, 2);
    memory_account()->poison = true;
    Trained poisoned = train(3, s, 3, 2);
    memory_account()->poison = false;
    EXPECT_EQ(poisoned.losses, clean.losses) << name_of(sync);
    EXPECT_EQ(poisoned.norms, clean.norms) << name_of(sync);
    expect_bitwise(poisoned.weights, clean.weights);
  }
}

}  // namespace
}  // namespace lockstep
