// Ranks with a GPU each. After a first sum something happens to rank 1: throw, kill, hang, or late
// (for less than the time limit). nccl_failure_test.sh runs it.   usage: failing_gpu_rank HOW BY

#include <csignal>
#include <cstdio>
#include <thread>

#include "common/device.h"
#include "common/kernels.h"
#include "common/options.h"
#include "common/ranks.h"

using namespace lockstep;

static void befall(const std::string& how) {
  if (how == "throw") fail("rank 1 does not feel well");
  if (how == "kill") std::raise(SIGKILL);
  if (how == "late") std::this_thread::sleep_for(std::chrono::milliseconds(1500));
  if (how == "hang") std::this_thread::sleep_for(std::chrono::hours(1));
}

int main(int argc, char** argv) {
  return run_main(argc, argv, [](int argc, char** argv) {
    require(argc == 3, "usage: failing_gpu_rank HOW kernels|copies");
    Launch launch;
    launch.device = Device::CUDA;
    launch.options.time_limit = 3;
    launch.options.copy_from = argv[2] == std::string("copies") ? 1 : INT64_MAX;
    return run_ranks(launch, [&](Communicator& world) {
      Tensor x = Tensor::zeros({1000}, DType::F32, Device::CUDA, Category::Buffers);
      for (int step = 0; step < 2; ++step) {
        if (step == 1 && world.rank() == 1) befall(argv[1]);
        world.all_reduce(x).wait();
        device::synchronize();
      }
      if (world.rank() == 0) std::printf("done\n");
    });
  });
}
