// Tensor parallelism in every layout gives the gradients of one rank.

#include <gtest/gtest.h>

#include "01_single_gpu/recompute.h"
#include "tests/layout.h"

namespace lockstep {
namespace {

using Tensors = std::map<std::string, std::vector<double>>;

struct Result {
  Tensors gradients, weights, start;
  double loss = 0, norm = 0;
};

Result run(MeshShape shape, LayoutRig::Settings settings, int steps) {
  Result result;
  Whole gradients, weights, start;
  run_threads(int(shape.ranks()), Device::CPU, {}, [&](Communicator& world) {
    ProcessMesh mesh(world, shape, settings.config.kv_heads);
    LayoutRig rig(settings, mesh);
    start.add(rig.parallel->owned(), &Owned::master);
    std::vector<MicroBatch> mine;
    for (int i = 0; i < 12; ++i)
      if (i % shape.dp == mesh.here().dp)
        mine.push_back(random_batch(1 + i % 2, 8, settings.config.vocab, uint64_t(i + 1), i % 4));
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
  result.start = start.get();
  return result;
}

TEST(TensorParallel, GradientsAreThoseOfOneRank) {
  for (bool tied : {false, true})
    for (bool biases : {false, true})
      for (int64_t kv : {8, 2}) {
        LayoutRig::Settings settings;
        settings.config.tied = tied;
        settings.config.heads = 8;
        settings.config.kv_heads = kv;
        settings.config.ffn = 26;
        settings.config.attention_bias = settings.config.mlp_bias = biases;
        settings.config.dropout = 0.2;
        Result one = run({}, settings, 3);
        for (int tp : {1, 2, 4, 8})
          for (TensorParallel how : {TensorParallel{}, {.sequence_parallel = true}, {.sequence_parallel = true, .gather_again = true}, {.sequence_parallel = true, .overlap = 3}})
            for (Sync sync : {Sync::Naive, Sync::Bucketed, Sync::Zero1, Sync::Zero3}) {
              for (int dp : {1, 2}) {
              if (dp * tp > 8) continue;
              settings.sync = sync;
              settings.tp_how = how;
              settings.parallel.bucket_bytes = 3000;
              Result many = run({.dp = dp, .tp = tp}, settings, 3);
              std::string what = text("TP", tp, " DP", dp, " ", name_of(sync), " sp ", how.sequence_parallel, " overlap ", how.overlap, " again ", how.gather_again, " kv ", kv, " tied ", tied);
              EXPECT_EQ(many.start, one.start) << what;
              EXPECT_NEAR(many.loss, one.loss, 1e-6) << what;
              EXPECT_NEAR(many.norm, one.norm, 1e-5) << what;
              for (auto& [name, g] : one.gradients)
                EXPECT_LT(relative_error(many.gradients[name], g), 1e-5) << name << " " << what;
              for (auto& [name, g] : one.weights)
                EXPECT_LT(relative_error(many.weights[name], g), 1e-5) << name << " " << what;
              if (HasFailure()) return;
            }}
      }
}

}  // namespace
}  // namespace lockstep
