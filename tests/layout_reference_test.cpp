// Ranks that share a batch, against what Hugging Face's library computes with all of it: loss,
// every gradient, ten training steps. LOCKSTEP_REFERENCE adds models (reference.h).

#include "tests/layout.h"
#include "tests/reference.h"

namespace lockstep {
namespace {

struct Case {
  std::string directory;
  Device device;
  int ranks;
  Sync sync;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.directory; }

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const std::string& directory : reference_directories())
    for (Device device : devices_here())
      for (int ranks : {2, 4})
        for (Sync sync : {Sync::Bucketed, Sync::Zero1, Sync::Zero2, Sync::Zero3})
          all.push_back({directory, device, ranks, sync});
  return all;
}

class LayoutReference : public ::testing::TestWithParam<Case> {};

TEST_P(LayoutReference, LossGradientsAndTenStepsOfAdamW) {
  const Case& c = GetParam();
  ReferenceOutputs outputs(c.directory);
  Whole gradients, weights;
  std::vector<double> losses = outputs.expected("adamw.losses");
  std::vector<double> norms = outputs.expected("adamw.grad_norms");
  run_threads(c.ranks, c.device, {.time_limit = 20}, [&](Communicator& world) {
    ProcessMesh mesh(world, {.dp = c.ranks});
    LayoutRig::Settings s;
    s.config = outputs.config();
    s.sync = c.sync;
    s.device = c.device;
    s.rule = outputs.rule();
    s.parallel.bucket_bytes = 20000;
    s.weights = [&](const std::vector<Owned>& owned) { outputs.load_weights(owned); };
    LayoutRig rig(s, mesh);
    MicroBatch mine = outputs.batch(c.device, {world.rank(), c.ranks});
    for (size_t step = 0; step < losses.size(); ++step) {
      rig.gradients({mine});
      if (step == 0) gradients.add(rig.parallel->owned(), &Owned::grad);
      rig.update();
      EXPECT_NEAR(rig.state().loss, losses[step], 1e-4 * losses[step]) << "step " << step;
      EXPECT_NEAR(rig.state().gradient_norm, norms[step], 1e-4 * norms[step]) << "step " << step;
    }
    weights.add(rig.parallel->owned(), &Owned::master);
  });
  EXPECT_EQ(losses.size(), 10u);
  for (const auto& [name, g] : gradients.get())
    EXPECT_LE(relative_error(g, outputs.expected("grad." + name)), 1e-4) << name;
  for (const auto& [name, w] : weights.get())
    EXPECT_LE(relative_error(w, outputs.expected("adamw.final." + name)), 1e-3) << name;
}

INSTANTIATE_TEST_SUITE_P(HuggingFace, LayoutReference, ::testing::ValuesIn(cases()),
                         [](const auto& info) {
                           const Case& c = info.param;
                           return std::filesystem::path(c.directory).filename().string() +
                                  (c.device == Device::CUDA ? "_cuda_" : "_cpu_") +
                                  text("DP", c.ranks, "_", name_of(c.sync));
                         });

}  // namespace
}  // namespace lockstep
