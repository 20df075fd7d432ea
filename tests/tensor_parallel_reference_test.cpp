// Ranks that share every matrix, against what Hugging Face's library computes with all of it:
// logits, loss, every gradient, ten training steps. LOCKSTEP_REFERENCE adds models (reference.h).

#include "tests/layout_reference.h"
#include "tests/tensor_parallel_cases.h"

namespace lockstep {
namespace {

struct Case {
  std::string directory;
  Device device;
  MeshShape shape;
  Variant variant;
};
void PrintTo(const Case& c, std::ostream* out) { *out << c.directory; }

std::vector<Case> cases() {
  std::vector<Case> all;
  for (const std::string& directory : reference_directories())
    for (Device device : devices_here())
      for (MeshShape shape : {MeshShape{.tp = 2}, MeshShape{.tp = 4}, MeshShape{.dp = 2, .tp = 2}})
        for (const Variant& variant : kVariants) all.push_back({directory, device, shape, variant});
  return all;
}
LayoutRig::Settings settings(const Case& c, const ReferenceOutputs& outputs) {
  LayoutRig::Settings s = reference_settings(outputs, c.device);
  s.sync = Sync::Zero1;
  s.tensor_parallel = c.variant.how;
  return s;
}

class TensorParallelReference : public ::testing::TestWithParam<Case> {};

TEST_P(TensorParallelReference, LossGradientsAndTenStepsOfAdamW) {
  const Case& c = GetParam();
  ReferenceOutputs outputs(c.directory);
  const int ranks = int(c.shape.ranks());
  expect_reference(outputs, ranks, c.device, [&](Communicator& world, auto train) {
    ProcessMesh mesh(world, c.shape, outputs.config().kv_heads);
    LayoutRig rig(settings(c, outputs), mesh);
    train(rig, {outputs.batch(c.device, {mesh.here().dp, c.shape.dp})});
  });
}

// A rank reads its rows of the head, and has their logits.
TEST_P(TensorParallelReference, Pitfall51_TheHeadReadFromAFileIsCut) {
  const Case& c = GetParam();
  ReferenceOutputs outputs(c.directory);
  const int64_t vocab = outputs.config().vocab;
  const std::vector<double> want = outputs.expected("logits");
  run_threads(int(c.shape.ranks()), c.device, {.time_limit = 20}, [&](Communicator& world) {
    ProcessMesh mesh(world, c.shape, outputs.config().kv_heads);
    LayoutRig rig(settings(c, outputs), mesh);
    Parameter* head = rig.model->parameters().back();
    if (outputs.config().tied) head = rig.model->table();
    EXPECT_EQ(head->shard.local[0], vocab / c.shape.tp) << head->name;
    Tape tape(Tape::Mode::Forget);
    MicroBatch batch = outputs.batch(c.device);
    std::vector<double> logits =
        doubles(rig.model->logits(tape, rig.model->forward(tape, batch)).value);
    Range mine = share(vocab, {mesh.here().tp, c.shape.tp});
    std::vector<double> theirs;
    for (int64_t t = 0; t < batch.inputs.size(); ++t)
      for (int64_t j = 0; j < mine.count; ++j)
        theirs.push_back(want[size_t(t * vocab + mine.first + j)]);
    EXPECT_LE(relative_error(logits, theirs), 1e-5);
  });
}

INSTANTIATE_TEST_SUITE_P(HuggingFace, TensorParallelReference, ::testing::ValuesIn(cases()),
                         [](const auto& info) {
                           const Case& c = info.param;
                           return std::filesystem::path(c.directory).filename().string() +
                                  (c.device == Device::CUDA ? "_cuda_" : "_cpu_") +
                                  text("DP", c.shape.dp, "_TP", c.shape.tp, "_", c.variant.name);
                         });

}  // namespace
}  // namespace lockstep
