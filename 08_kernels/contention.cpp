// Communication is no free companion of computation. The kernels that move a message between GPUs
// run on multiprocessors, too, and read and write the same memory:
//
//     alone       ████ matmuls ████                 ░░░ all-reduce ░░░
//     at once     ██████ matmuls ██████             each is slower than alone, and yet the whole is
//                 ░░░░ all-reduce ░░░░              shorter than one after the other
//
//     ./lockstep run 08 contention -n 2 --device cuda
//     ./lockstep run 08 contention -n 2 --device cuda --by copies
//
// Copy engines move without multiprocessors (common/comm_copies.h); what is left to fight for is
// memory. The all-reduce is large enough to be under way as long as the matmuls are.

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>

#include "common/device.h"
#include "common/kernels.h"
#include "common/launch_flags.h"

using namespace lockstep;

namespace {

struct Flags {
  int64_t size = 8192, megabytes = 1024, matmuls = 2, rounds = 15;
  std::string by = "kernels";
};

double median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

void run(Communicator& world, const Flags& f) {
  require(world.size() > 1, "one rank has nobody to send to: start two processes (-n 2)");
  Tensor a = Tensor::empty({f.size, f.size}, DType::BF16, Device::CUDA), b = a.like(), c = a.like();
  Tensor message = Tensor::empty({f.megabytes << 19}, DType::BF16, Device::CUDA, Category::Buffers);
  for (const Tensor& t : {a, b}) on(t).fill_normal(t, 1, RandomStream(1, "matmul"), {}, 0);
  zero(message);  // it is summed again and again, and must stay finite

  struct Times {
    double matmuls, all;
  };
  auto once = [&](bool computes, bool communicates) {
    device::TimedEvent begin, computed, end;
    world.barrier();
    device::synchronize();
    begin.record();
    Work work;
    if (communicates) work = world.all_reduce(message);
    for (int64_t i = 0; computes && i < f.matmuls; ++i) on(c).matmul(c, a, Op::N, b, Op::T, 0);
    computed.record();
    work.wait();
    end.record();
    return Times{computed.seconds_since(begin), end.seconds_since(begin)};
  };
  std::vector<double> matmuls, message_alone, overlapped, both;
  for (int64_t round = -3; round < f.rounds; ++round) {  // three to warm up
    Times compute = once(true, false), communicate = once(false, true), all = once(true, true);
    if (round < 0) continue;
    matmuls.push_back(compute.all), message_alone.push_back(communicate.all);
    overlapped.push_back(all.matmuls), both.push_back(all.all);
  }
  if (world.rank() > 0) return;
  double alone = median(matmuls), beside = median(overlapped), moved = median(message_alone);
  std::printf("%d ranks, %s, messages by %s\n", world.size(), device::name(Device::CUDA).c_str(),
              f.by.c_str());
  std::printf("%lld matmuls of %lld^3 alone          %9.2f ms\n", static_cast<long long>(f.matmuls),
              static_cast<long long>(f.size), alone * 1e3);
  std::printf("all-reduce of %lld MB alone           %9.2f ms\n",
              static_cast<long long>(f.megabytes), moved * 1e3);
  std::printf("matmuls beside the all-reduce        %9.2f ms   %.2f times as long\n", beside * 1e3,
              beside / alone);
  std::printf("both at once                         %9.2f ms   one after the other: %.2f ms\n",
              median(both) * 1e3, (alone + moved) * 1e3);
  std::printf(beside > alone ? "overlapped matmuls are slower than alone\n"
                             : "overlapped matmuls are as fast as alone\n");
}

}  // namespace

int main(int argc, char** argv) {
  return run_main(argc, argv, [](int argc, char** argv) {
    Flags f;
    auto launch = parse_launch(
        argc, argv, "How much slower is a matmul beside an all-reduce?", [&](CLI::App& app) {
          auto number = [&](const char* name, auto& value, const char* what) {
            return app.add_option(name, value, what)->capture_default_str();
          };
          whole(number("--size", f.size, "rows, columns and depth of the matmul"), 1, 32768);
          whole(number("--megabytes", f.megabytes, "of the message"), 1, 16384);
          whole(number("--matmuls", f.matmuls, "beside one message"), 1, 1000);
          whole(number("--rounds", f.rounds, "of which the median counts"), 1, 1000);
          word(number("--by", f.by, "who moves the message: NCCL's kernels, or copies"),
               {"kernels", "copies"});
        });
    if (!launch) return 0;
    require(launch->device == Device::CUDA,
            "contention is between kernels of a GPU: say --device cuda");
    launch->options.copy_from = f.by == "kernels" ? INT64_MAX : 1;
    return run_ranks(*launch, [&](Communicator& world) { run(world, f); });
  });
}
