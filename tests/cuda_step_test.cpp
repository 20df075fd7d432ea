// A training step on the GPU: the host never waits inside it, and it gives what the CPU gives.

#include <gtest/gtest.h>

#include "common/device_cuda.h"
#include "tests/rig.h"

namespace lockstep {
namespace {

Rig::Settings settings(DType compute, Device device = Device::CUDA) {
  Rig::Settings s;
  s.config.hidden = 64;
  s.config.head_dim = 16;
  s.config.ffn = 96;
  s.config.dropout = 0.1;
  s.config.attention_bias = true;
  s.config.init_std = 0.1;
  s.compute = compute;
  s.device = device;
  return s;
}

// One instance per type where there is a GPU, none elsewhere.
class CudaStep : public ::testing::TestWithParam<DType> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CudaStep);
INSTANTIATE_TEST_SUITE_P(Cuda, CudaStep,
                         ::testing::ValuesIn(device::available()
                                                 ? std::vector<DType>{DType::F32, DType::BF16}
                                                 : std::vector<DType>{}),
                         [](const auto& info) { return std::string(name_of(info.param)); });

// A stream that is being captured refuses everything that would make the host wait:
// synchronisation, blocking copies, plain allocation. So a step that can be captured does none of
// these; replaying the graph does what the step would have done.
TEST_P(CudaStep, NoHostSynchronisationInsideAStep) {
  Rig captured(settings(GetParam())), plain(settings(GetParam()));
  std::vector<MicroBatch> batches;
  for (uint64_t i : {1, 2}) batches.push_back(random_batch(3, 32, 20, i, 7, Device::CUDA));
  Tensor valid = plain.valid(batches);
  for (int i = 0; i < 2; ++i) captured.step(batches, valid);  // libraries set themselves up
  for (int i = 0; i < 5; ++i) plain.step(batches, valid);
  device::synchronize();

  check(cudaStreamBeginCapture(device::stream(), cudaStreamCaptureModeGlobal));
  captured.step(batches, valid);
  cudaGraph_t graph = nullptr;
  check(cudaStreamEndCapture(device::stream(), &graph));
  size_t nodes = 0;
  check(cudaGraphGetNodes(graph, nullptr, &nodes));
  EXPECT_GT(nodes, 100u);
  cudaGraphExec_t replay = nullptr;
  check(cudaGraphInstantiate(&replay, graph, 0));
  for (int i = 0; i < 3; ++i) check(cudaGraphLaunch(replay, device::stream()));
  device::synchronize();

  EXPECT_EQ(captured.state().updates, 5);
  EXPECT_EQ(captured.state().loss, plain.state().loss);
  auto a = captured.parallel.owned(), b = plain.parallel.owned();
  for (size_t i = 0; i < a.size(); ++i)
    EXPECT_EQ(doubles(a[i].master), doubles(b[i].master)) << a[i].parameter->name;
  check(cudaGraphExecDestroy(replay));
  check(cudaGraphDestroy(graph));
}

// Each tensor's gradient against the CPU's in fp32. In bf16 both devices round, and the GPU may be
// no further off than the CPU is (both a few per cent on a model this small).
TEST_P(CudaStep, GivesTheGradientsOfTheCpu) {
  Rig exact(settings(DType::F32, Device::CPU)), cpu(settings(GetParam(), Device::CPU));
  Rig gpu(settings(GetParam()));
  auto want = exact.parallel.owned(), theirs = cpu.parallel.owned(), ours = gpu.parallel.owned();
  for (size_t i = 0; i < ours.size(); ++i) assign(ours[i], want[i].master);
  exact.gradients({random_batch(8, 32, 20, 1, 7)});
  cpu.gradients({random_batch(8, 32, 20, 1, 7)});
  gpu.gradients({random_batch(8, 32, 20, 1, 7, Device::CUDA)});
  EXPECT_NEAR(gpu.state().loss, exact.state().loss, GetParam() == DType::BF16 ? 2e-2 : 1e-5);
  for (size_t i = 0; i < ours.size(); ++i) {
    std::vector<double> reference = doubles(want[i].grad);
    double error = relative_error(doubles(ours[i].grad), reference);
    EXPECT_LE(error, 1.6 * relative_error(doubles(theirs[i].grad), reference) + 1e-5)
        << ours[i].parameter->name;
    EXPECT_LE(error, GetParam() == DType::BF16 ? 4e-2 : 1e-5) << ours[i].parameter->name;
  }
}

TEST_P(CudaStep, RepeatedRunsGiveTheSameBits) {
  auto run = [&] {
    Rig rig(settings(GetParam()));
    for (uint64_t i = 0; i < 4; ++i) rig.step({random_batch(3, 32, 20, i, 7, Device::CUDA)});
    std::vector<std::vector<double>> all;
    for (const Owned& o : rig.parallel.owned()) all.push_back(doubles(o.master));
    return all;
  };
  EXPECT_EQ(run(), run());
}

// Every kernel writes what it promises and reads nothing that nobody wrote: fresh memory is NaN.
TEST_P(CudaStep, PoisonedMemoryChangesNothing) {
  auto run = [&](bool poison) {
    memory_account()->poison = poison;
    Rig rig(settings(GetParam()));
    for (uint64_t i = 0; i < 3; ++i) rig.step({random_batch(3, 32, 20, i, 7, Device::CUDA)});
    memory_account()->poison = false;
    std::vector<std::vector<double>> all;
    for (const Owned& o : rig.parallel.owned()) all.push_back(doubles(o.master));
    return all;
  };
  EXPECT_EQ(run(false), run(true));
}

TEST_P(CudaStep, MomentsAndWeightsTakeTheBytesOfTheFormula) {
  auto account = std::make_shared<MemoryAccount>();
  std::swap(memory_account(), account);
  {
    Rig rig(settings(GetParam()));
    rig.step({random_batch(3, 32, 20, 1, 7, Device::CUDA)});
    int64_t n = rig.settings.config.parameters();
    bool narrow = GetParam() == DType::BF16;
    EXPECT_EQ(memory_account()->now(Category::Weights), (narrow ? 2 : 4) * n);
    EXPECT_EQ(memory_account()->now(Category::Gradients), 4 * n);
    EXPECT_EQ(memory_account()->now(Category::Master), (narrow ? 4 : 0) * n);
    EXPECT_EQ(memory_account()->now(Category::Moments), 8 * n);
  }
  std::swap(memory_account(), account);
}

}  // namespace
}  // namespace lockstep
