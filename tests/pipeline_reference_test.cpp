// A batch that flows through a pipeline, against what Hugging Face's library computes with it at
// once: loss, every gradient, ten training steps. LOCKSTEP_REFERENCE adds models (reference.h).

#include "tests/layout_reference.h"
#include "tests/pipeline_rig.h"

namespace lockstep {
namespace {

struct Case {
  std::string directory;
  Device device;
  PipelineCase pipeline;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.directory; }

// As many layouts as the model has layers for, and the batch sequences.
std::vector<Case> cases() {
  std::vector<Case> all;
  for (const std::string& directory : reference_directories()) {
    ReferenceOutputs outputs(directory);
    int64_t sequences = outputs.sequences();
    for (Device device : devices_here())
      for (const std::string& schedule : schedule_names())
        for (int pp : {2, 4})
          for (int m : {2, 4}) {
            PipelineCase c{schedule, pp, m};
            if (!c.allowed() || m > sequences) continue;
            if (c.make(m).placement.stages() <= outputs.config().layers)
              all.push_back({directory, device, c});
            c.dp = 2, c.sync = Sync::Zero1;
            if (2 * m <= sequences && c.make(m).placement.stages() <= outputs.config().layers)
              all.push_back({directory, device, c});
          }
  }
  return all;
}

class PipelineReference : public ::testing::TestWithParam<Case> {};

TEST_P(PipelineReference, LossGradientsAndTenStepsOfAdamW) {
  const PipelineCase& c = GetParam().pipeline;
  ReferenceOutputs outputs(GetParam().directory);
  const Device device = GetParam().device;
  expect_reference(outputs, c.ranks(), device, [&](Communicator& world, auto train) {
    ProcessMesh mesh(world, {.dp = c.dp, .pp = c.pp});
    PipelineRig rig(reference_settings(outputs, device), c, mesh);
    std::vector<MicroBatch> mine;
    for (int i = 0; i < c.micro_batches; ++i)
      mine.push_back(outputs.batch(device, {i * c.dp + mesh.here().dp, c.micro_batches * c.dp}));
    train(rig, mine);
  });
}

INSTANTIATE_TEST_SUITE_P(HuggingFace, PipelineReference, ::testing::ValuesIn(cases()),
                         [](const auto& info) {
                           const Case& c = info.param;
                           std::string schedule = c.pipeline.schedule;
                           std::replace(schedule.begin(), schedule.end(), '-', '_');
                           return std::filesystem::path(c.directory).filename().string() +
                                  (c.device == Device::CUDA ? "_cuda_" : "_cpu_") +
                                  text(schedule, "_PP", c.pipeline.pp, "_DP", c.pipeline.dp, "_m",
                                       c.pipeline.micro_batches);
                         });

}  // namespace
}  // namespace lockstep
