// Ranks that share a batch, against what Hugging Face's library computes with all of it: loss,
// every gradient, ten training steps. LOCKSTEP_REFERENCE adds models (reference.h).

#include "tests/layout_reference.h"

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
  expect_reference(outputs, c.ranks, c.device, [&](Communicator& world, auto train) {
    ProcessMesh mesh(world, {.dp = c.ranks});
    LayoutRig::Settings s = reference_settings(outputs, c.device);
    s.sync = c.sync;
    LayoutRig rig(s, mesh);
    train(rig, {outputs.batch(c.device, {world.rank(), c.ranks})});
  });
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
