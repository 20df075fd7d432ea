// The first hour with a GPU: what it is made of, a first kernel, fusion, divergence, and how to
// time a kernel and how not to.
//
//     ./lockstep run 08 basics
//     ./lockstep run 08 basics --rows 10000 --columns 10000

#include "08_kernels/basics.h"

#include <CLI/CLI.hpp>
#include <chrono>
#include <cmath>
#include <cstdio>

#include "08_kernels/device_facts.h"
#include "08_kernels/rung.h"
#include "common/command_line.h"
#include "common/device.h"
#include "common/device_cuda.h"

using namespace lockstep;
using namespace lockstep::basics;

namespace {

using Call = std::function<void()>;

Tensor normal(const Shape& shape, const char* name) {
  Tensor t = Tensor::empty(shape, DType::F32, Device::CUDA);
  on(t).fill_normal(t, 1, RandomStream(1, name), {}, 0);
  return t;
}

DeviceFacts facts_of_this_gpu() {
  int index = 0;
  check(cudaGetDevice(&index));
  cudaDeviceProp p;
  check(cudaGetDeviceProperties(&p, index));
  return {p.name,
          p.major,
          p.minor,
          p.multiProcessorCount,
          p.warpSize,
          p.maxThreadsPerBlock,
          p.maxThreadsPerMultiProcessor,
          p.regsPerMultiprocessor,
          int64_t(p.sharedMemPerMultiprocessor),
          p.l2CacheSize,
          int64_t(p.totalGlobalMem)};
}

double median_seconds(const Call& call) {
  return ladder::time_in_turns({{"", "", [&](cudaStream_t) { call(); }}})[0];
}

void print_row(const char* name, int launches, int64_t bytes, double seconds) {
  std::printf("  %-28s %9d %12.1f %10.1f %8.2f\n", name, launches, double(bytes) * 1e-6,
              seconds * 1e6, double(bytes) / seconds * 1e-12);
}
void print_head(const char* what) {
  std::printf("\n%-30s %9s %12s %10s %8s\n", what, "launches", "MB moved", "us", "TB/s");
}

void first_kernel(int64_t n) {
  Tensor a = normal({n}, "a"), b = normal({n}, "b"), c = a.like();
  vector_add(c, a, b);
  std::vector<float> x = a.values<float>(), y = b.values<float>(), z = c.values<float>();
  for (size_t i = 0; i < z.size(); ++i)
    require(z[i] == x[i] + y[i], "element ", i, " of the sum is ", z[i], ", not ", x[i] + y[i]);
  print_head(text("vector_add of ", with_commas(n)).c_str());
  print_row("one thread per element", 1, 3 * c.bytes(),
            median_seconds([&] { vector_add(c, a, b); }));
}

void require_equal(const char* what, const Tensor& a, const Tensor& b) {
  std::vector<float> x = a.values<float>(), y = b.values<float>();
  for (size_t i = 0; i < x.size(); ++i)
    require(std::abs(x[i] - y[i]) <= 1e-4f * (1 + std::abs(x[i])), what, " element ", i,
            ": separate ", x[i], ", fused ", y[i]);
}

void fusion(int64_t n, int64_t rows, int64_t columns) {
  Tensor x = normal({n}, "x"), separate = x.like(), fused = x.like();
  double slow = median_seconds([&] { elu_separate(separate, x); });
  double fast = median_seconds([&] { elu_fused(fused, x); });
  require_equal("ELU", separate, fused);
  print_head("ELU");
  print_row("separate", 3, 7 * x.bytes(), slow);
  print_row("fused", 1, 2 * x.bytes(), fast);

  Tensor in = normal({rows, columns}, "in"), gain = normal({columns}, "g");
  Tensor bias = normal({columns}, "b"), y = in.like(), z = in.like();
  slow = median_seconds([&] { layer_norm_separate(y, in, gain, bias); });
  fast = median_seconds([&] { layer_norm_fused(z, in, gain, bias); });
  require_equal("LayerNorm", y, z);
  print_head(text("LayerNorm ", rows, " x ", columns).c_str());
  print_row("separate", 6, 10 * in.bytes(), slow);
  print_row("fused", 1, 2 * in.bytes(), fast);
}

void divergence() {
  Tensor out = Tensor::empty({1 << 22}, DType::F32, Device::CUDA);
  std::printf("\n%-30s %14s %14s\n", "ways through an if", "threads differ", "warps differ");
  double one = 0;
  for (int ways : {1, 2, 4, 8, 16, 32}) {
    double threads = median_seconds([&] { go_ways(out, ways, false); });
    double warps = median_seconds([&] { go_ways(out, ways, true); });
    if (ways == 1) one = threads;
    std::printf("  %-28d %13.1fx %13.1fx\n", ways, threads / one, warps / one);
  }
}

// The same kernel, measured in four ways.
void timing(int64_t rows, int64_t columns) {
  Tensor x = normal({rows, columns}, "x"), gain = normal({columns}, "g");
  Tensor bias = normal({columns}, "b"), y = x.like();
  auto call = [&] { layer_norm_fused(y, x, gain, bias); };
  auto host_seconds = [](const Call& body) {
    auto begin = std::chrono::steady_clock::now();
    body();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
  };
  auto print = [](double seconds, const char* how, const char* verdict) {
    std::printf("  %10.1f us  %-46s %s\n", seconds * 1e6, how, verdict);
  };
  device::synchronize();
  std::printf("\ntiming LayerNorm %lld x %lld\n", static_cast<long long>(rows),
              static_cast<long long>(columns));
  print(host_seconds(call), "host clock around the launch", "wrong: that is the launch");
  device::synchronize();
  for (int i = 0; i < 10; ++i) call();  // 10 to warm up, still running when the clock starts
  print(host_seconds([&] {
          call();
          device::synchronize();
        }),
        "host clock, with what was queued before", "wrong: 11 kernels");
  print(host_seconds([&] {
          call();
          device::synchronize();
        }),
        "host clock, synchronised on both sides", "right, plus launch and wait");
  print(median_seconds(call), "events around it, warm, median", "right");
}

}  // namespace

int main(int argc, char** argv) {
  return run_main(argc, argv, [](int argc, char** argv) {
    int64_t n = 1 << 26, rows = 10000, columns = 10000;
    bool dry_run = false;
    CLI::App app("What a GPU is made of, and the first kernels.");
    whole(app.add_option("--elements", n, "of vectors")->capture_default_str(), 1, 1 << 30);
    whole(app.add_option("--rows", rows, "of LayerNorm")->capture_default_str(), 1, 1 << 20);
    whole(app.add_option("--columns", columns, "of LayerNorm")->capture_default_str(), 1, 1 << 20);
    app.add_flag("--dry-run", dry_run, "check the flags and stop");
    if (!parse_flags(app, argc, argv) || dry_run) return 0;
    require(device::available(),
            "this program runs kernels on a GPU, and there is none: ", device::why_not());

    std::printf("%s", to_text(facts_of_this_gpu()).c_str());
    first_kernel(n);
    fusion(n, rows, columns);
    divergence();
    timing(rows, columns);
    return 0;
  });
}
