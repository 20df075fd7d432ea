// Every way to hold and sum gradients gives those of one rank, per tensor.

#include <gtest/gtest.h>

#include "01_single_gpu/recompute.h"
#include "tests/layout.h"

namespace lockstep {
namespace {

using Tensors = std::map<std::string, std::vector<double>>;

// Six micro-batches of unequal size, with unequal numbers of valid targets.
std::vector<MicroBatch> global_batch(int64_t vocab) {
  std::vector<MicroBatch> all;
  for (int i = 0; i < 12; ++i) all.push_back(random_batch(1 + i % 2, 5, vocab, uint64_t(i + 1), i % 4));
  return all;
}

struct Result {
  Tensors gradients, weights;
  double loss = 0, norm = 0;
};

Result run(int ranks, LayoutRig::Settings settings, int accumulation, int steps) {
  Result result;
  Whole gradients, weights;
  run_threads(ranks, Device::CPU, {}, [&](Communicator& world) {
    ProcessMesh mesh(world, {.dp = ranks});
    LayoutRig rig(settings, mesh);
    std::vector<MicroBatch> all = global_batch(settings.config.vocab), mine;
    all.resize(size_t(12));
    // Rank r takes every ranks-th piece of the step, whatever that comes to per rank.
    (void)accumulation;
    for (size_t i = size_t(world.rank()); i < all.size(); i += size_t(ranks)) mine.push_back(all[i]);
    for (int s = 0; s < steps; ++s) {
      rig.gradients(mine);
      if (s == 0) gradients.add(rig.parallel->owned(), &Owned::grad);
      rig.optimizer->step([&](size_t i) { rig.parallel->updated(i); });
      rig.parallel->publish();
    }
    weights.add(rig.parallel->owned(), &Owned::master);
    if (world.rank() == 0) result.loss = rig.state().loss, result.norm = rig.state().gradient_norm;
  });
  result.gradients = gradients.get();
  result.weights = weights.get();
  return result;
}

TEST(Layout, GradientsOfEveryStrategyAreThoseOfOneRank) {
  for (bool tied : {false, true}) {
    LayoutRig::Settings settings;
    settings.config.tied = tied;
    Result one = run(1, settings, 1, 3);
    for (int ranks : {2, 3, 4})
      for (Sync sync : kAllSyncs) {
        settings.sync = sync;
        settings.parallel.bucket_bytes = 3000;
        Result many = run(ranks, settings, 1, 3);
        EXPECT_NEAR(many.loss, one.loss, 1e-6);
        EXPECT_NEAR(many.norm, one.norm, 1e-5);
        for (auto& [name, g] : one.gradients)
          EXPECT_LT(relative_error(many.gradients[name], g), 1e-5) << name << " " << name_of(sync) << ranks;
        for (auto& [name, g] : one.weights)
          EXPECT_LT(relative_error(many.weights[name], g), 1e-5) << name << " " << name_of(sync) << ranks;
      }
  }
}

}  // namespace
}  // namespace lockstep
