#pragma once
// What Hugging Face's library computes with a batch at once, against ranks that share the work.

#include "tests/layout.h"
#include "tests/reference.h"

namespace lockstep {

inline LayoutRig::Settings reference_settings(const ReferenceOutputs& outputs, Device device) {
  LayoutRig::Settings s;
  s.config = outputs.config();
  s.device = device;
  s.rule = outputs.rule();
  s.parallel.bucket_bytes = 20000;
  s.weights = [&outputs](const std::vector<Owned>& owned) { outputs.load_weights(owned); };
  return s;
}

// Loss, every gradient, ten training steps. on_rank(world, train) makes a rank's rig and calls
// train(rig, its micro-batches).
template <class OnRank>
void expect_reference(const ReferenceOutputs& outputs, int ranks, Device device,
                      const OnRank& on_rank) {
  Whole gradients, weights;
  std::vector<double> losses = outputs.expected("adamw.losses");
  std::vector<double> norms = outputs.expected("adamw.grad_norms");
  auto train = [&](auto& rig, const std::vector<MicroBatch>& mine) {
    for (size_t step = 0; step < losses.size(); ++step) {
      rig.gradients(mine);
      if (step == 0) gradients.add(rig.parallel->owned(), &Owned::grad);
      rig.update();
      EXPECT_NEAR(rig.state().loss, losses[step], 1e-4 * losses[step]) << "step " << step;
      EXPECT_NEAR(rig.state().gradient_norm, norms[step], 1e-4 * norms[step]) << "step " << step;
    }
    weights.add(rig.parallel->owned(), &Owned::master);
  };
  run_threads(ranks, device, {.time_limit = 20},
              [&](Communicator& world) { on_rank(world, train); });
  EXPECT_EQ(losses.size(), 10u);
  for (const auto& [name, g] : gradients.get())
    EXPECT_LE(relative_error(g, outputs.expected("grad." + name)), 1e-4) << name;
  for (const auto& [name, w] : weights.get())
    EXPECT_LE(relative_error(w, outputs.expected("adamw.final." + name)), 1e-3) << name;
}

}  // namespace lockstep
