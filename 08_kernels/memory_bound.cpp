// How close do the memory-bound kernels of a training step come to a copy of as many bytes?
//
//     ./lockstep run 08 memory_bound
//     ./lockstep run 08 memory_bound --tokens 4096 --only rope --csv out.csv --svg out.svg
//
// Each operation runs in its plain version (plain.h, one kernel for each step) and as the kernel
// that a training step runs, taken from the table in common/kernels.h. The bytes are those of the
// fused one: each input once, each output once. The copy beside it reads half of them and writes
// half.
//
// What was touched last is still in the L2 cache, and a test that ran on the same tensors again and
// again would measure that. So launches go round several sets of tensors.

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <memory>

#include "08_kernels/plain.h"
#include "08_kernels/rung.h"
#include "common/command_line.h"
#include "common/device.h"

using namespace lockstep;
using ladder::Results;
using ladder::Run;

namespace {

struct Flags {
  // A micro-batch of 8 sequences of the 1.7B shape.
  int64_t tokens = 16384, hidden = 2048, ffn = 8192, heads = 32, vocabulary = 49152;
  std::string type, only, csv, svg;
  bool check = false, dry_run = false;
};

using Tensors = std::vector<Tensor>;
struct Problem {
  std::string name;
  int64_t bytes;                  // that the fused kernel must move
  std::function<Tensors()> make;  // always the same numbers
  std::vector<size_t> outputs;    // which of them are results
  std::function<void(const Tensors&)> plain, fused;
};

Tensor normal(const Shape& shape, DType type, const char* name, float std = 1) {
  Tensor t = Tensor::empty(shape, type, Device::CUDA);
  on(t).fill_normal(t, std, RandomStream(1, name), {}, 0);
  return t;
}
Tensor blank(const Shape& shape, DType type) { return Tensor::zeros(shape, type, Device::CUDA); }
Tensor integers(int64_t n, int64_t below) {
  std::vector<int32_t> values;
  for (int64_t i = 0; i < n; ++i) values.push_back(int32_t(i * 7919 % below));
  return Tensor::from(values, {n}, Device::CUDA);
}

std::vector<Problem> norm_problems(const Flags& f, DType type) {
  Kernels& k = kernels(Device::CUDA);
  Shape rows = {f.tokens}, all = {f.tokens, f.hidden}, one = {f.hidden};
  int64_t once = f.tokens * f.hidden * int64_t(size_of(type));
  // y, rstd, x, delta, sum, gain
  auto forward = [=] {
    return Tensors{blank(all, type),           blank(rows, DType::F32), normal(all, type, "x"),
                   normal(all, type, "delta"), blank(all, type),        normal(one, type, "gain")};
  };
  // dx, dy, d_sum, x, rstd, gain
  auto backward = [=] {
    Tensor rstd = normal(rows, DType::F32, "rstd");
    return Tensors{blank(all, type),
                   normal(all, type, "dy"),
                   normal(all, type, "d_sum"),
                   normal(all, type, "x"),
                   rstd,
                   normal(one, type, "gain")};
  };
  auto without = [](const Tensors&) { return Tensor(); };
  return {
      {"rmsnorm",
       2 * once,
       forward,
       {0, 1},
       [=](auto& t) { plain::rmsnorm(t[0], t[1], t[2], without(t), without(t), t[5], 1e-5f); },
       [=, &k](auto& t) { k.rmsnorm(t[0], t[1], t[2], without(t), without(t), t[5], 1e-5f); }},
      {"rmsnorm + residual",
       4 * once,
       forward,
       {0, 1, 4},
       [](auto& t) { plain::rmsnorm(t[0], t[1], t[2], t[3], t[4], t[5], 1e-5f); },
       [&k](auto& t) { k.rmsnorm(t[0], t[1], t[2], t[3], t[4], t[5], 1e-5f); }},
      {"rmsnorm backward",
       3 * once,
       backward,
       {0},
       [=](auto& t) { plain::rmsnorm_backward(t[0], t[1], without(t), t[3], t[4], t[5]); },
       [=, &k](auto& t) { k.rmsnorm_backward(t[0], t[1], without(t), t[3], t[4], t[5]); }},
      {"rmsnorm + residual, backward",
       4 * once,
       backward,
       {0},
       [](auto& t) { plain::rmsnorm_backward(t[0], t[1], t[2], t[3], t[4], t[5]); },
       [&k](auto& t) { k.rmsnorm_backward(t[0], t[1], t[2], t[3], t[4], t[5]); }},
  };
}

std::vector<Problem> layer_problems(const Flags& f, DType type) {
  Kernels& k = kernels(Device::CUDA);
  int64_t size = int64_t(size_of(type)), head = f.hidden / f.heads;
  AttentionShape s{1, f.tokens, f.heads, f.heads, head};
  auto gated = [=] {
    return Tensors{blank({f.tokens, f.ffn}, type), normal({f.tokens, 2 * f.ffn}, type, "gate_up")};
  };
  auto turned = [=] {
    std::vector<float> frequencies;
    for (int64_t i = 0; i < head / 2; ++i)
      frequencies.push_back(float(std::pow(10000.0, -2.0 * double(i) / double(head))));
    return Tensors{blank({f.tokens, s.columns()}, type),
                   normal({f.tokens, s.columns()}, type, "qkv"), integers(f.tokens, 2048),
                   Tensor::from(frequencies, {head / 2}, Device::CUDA)};
  };
  return {
      {"swiglu",
       3 * f.tokens * f.ffn * size,
       gated,
       {0},
       [](auto& t) { plain::swiglu(t[0], t[1]); },
       [&k](auto& t) { k.swiglu(t[0], t[1]); }},
      {"rope",
       2 * f.tokens * s.columns() * size,
       turned,
       {0},
       [s](auto& t) { plain::rope(t[0], t[1], t[2], t[3], s); },
       [s, &k](auto& t) { k.rope(t[0], t[1], t[2], t[3], s, false); }},
  };
}

Problem loss_problem(const Flags& f, DType type) {
  Kernels& k = kernels(Device::CUDA);
  // loss, lse, logits, targets, scale
  auto make = [=] {
    return Tensors{blank({1}, DType::F32), blank({f.tokens}, DType::F32),
                   normal({f.tokens, f.vocabulary}, type, "logits"),
                   integers(f.tokens, f.vocabulary),
                   Tensor::from<float>({1 / float(f.tokens)}, {1}, Device::CUDA)};
  };
  return {"cross-entropy",
          f.tokens * f.vocabulary * int64_t(size_of(type)),
          make,
          {0, 1},
          [](auto& t) { plain::cross_entropy(t[0], t[1], t[2], t[3], t[4]); },
          [&k](auto& t) { k.cross_entropy(t[0], t[1], t[2], t[3], t[4]); }};
}

std::vector<Problem> step_problems(const Flags& f, DType type) {
  Kernels& k = kernels(Device::CUDA);
  UpdateRule rule;
  int64_t n = f.hidden * f.ffn;
  // value, master, m, v, grad, state
  auto weight = [=] {
    StepState state;
    state.clip = 0.5f, state.learning_rate = 1e-3f, state.bias1 = 0.1f, state.bias2 = 0.05f;
    const auto* bytes = reinterpret_cast<const uint8_t*>(&state);
    Tensor v = normal({n}, DType::F32, "v");
    kernels(Device::CUDA).fill(v, 0.5);
    return Tensors{blank({n}, type),
                   normal({n}, DType::F32, "w"),
                   normal({n}, DType::F32, "m"),
                   v,
                   normal({n}, DType::F32, "g"),
                   Tensor::from(std::vector<uint8_t>(bytes, bytes + sizeof state),
                                {int64_t(sizeof state)}, Device::CUDA)};
  };
  // The gradients of a model of 135M weights: many, of which a launch each is a large part.
  std::vector<int64_t> sizes = {49152 * 576, 576};
  for (int layer = 0; layer < 30; ++layer)
    for (int64_t size :
         {576 * 576, 192 * 576, 192 * 576, 576 * 576, 1536 * 576, 1536 * 576, 1536 * 576, 576, 576})
      sizes.push_back(size);
  int64_t bytes = 0;
  for (int64_t size : sizes) bytes += size * 4;
  auto gradients = [=] {  // the sums, their parts, the state, and the gradients
    Tensors all = {blank({2}, DType::F64), blank({int64_t(sizes.size())}, DType::F64),
                   blank({int64_t(sizeof(StepState))}, DType::U8)};
    for (int64_t size : sizes) all.push_back(normal({size}, DType::F32, "g", 1e-3f));
    return all;
  };
  auto each = [](const Tensors& t) {
    for (size_t i = 3; i < t.size(); ++i) plain::sum_squares(t[1].flat(int64_t(i) - 3, 1), t[i]);
  };
  auto all = [&k](const Tensors& t) { k.sum_squares(t[1], {t.begin() + 3, t.end()}); };
  return {{"adamw",
           n * (28 + int64_t(size_of(type))),
           weight,
           {0, 1, 2, 3},
           [=](auto& t) { plain::adamw(t[0], t[1], t[2], t[3], t[4], t[5], rule, true); },
           [=, &k](auto& t) { k.adamw(t[0], t[1], t[2], t[3], t[4], t[5], rule, true); }},
          {text("norm of ", sizes.size(), " gradients"),
           bytes,
           gradients,
           {0},
           [=, &k](auto& t) { each(t), k.local_sums(t[0], t[2], t[1]); },
           [=, &k](auto& t) { all(t), k.local_sums(t[0], t[2], t[1]); }}};
}

// The plain and the fused version must agree to what rounding to the type allows.
void compare(const Problem& p, const Tensors& plain, const Tensors& fused, DType type) {
  for (size_t i : p.outputs) {
    auto values = [](const Tensor& t) {
      Tensor some = t.flat(0, std::min<int64_t>(t.size(), 1 << 20)).to(Device::CPU);
      device::synchronize();
      Tensor wide = Tensor::empty(some.shape(), DType::F64, Device::CPU);
      kernels(Device::CPU).cast(wide, some);
      return wide.values<double>();
    };
    std::vector<double> a = values(plain[i]), b = values(fused[i]);
    double largest = 1e-30, apart = 0;
    for (size_t j = 0; j < a.size(); ++j) {
      largest = std::max(largest, std::abs(a[j]));
      double d = std::abs(a[j] - b[j]);
      apart = d <= apart ? apart : d;  // NaN stays
    }
    require(apart <= (type == DType::BF16 ? 3e-2 : 1e-4) * largest, p.name, ": output ", i,
            " of the plain and the fused kernel are ", apart, " apart, and the largest is ",
            largest);
  }
}

void time(Results& results, const Problem& p, const std::vector<Tensors>& sets) {
  auto round_robin = [&](auto body) {
    return [&sets, body, next = std::make_shared<size_t>(0)](cudaStream_t) {
      body(sets[(*next)++ % sets.size()]);
    };
  };
  std::vector<std::pair<Tensor, Tensor>> copies;
  for (size_t i = 0; i < sets.size(); ++i)
    copies.push_back({blank({p.bytes / 2}, DType::U8), blank({p.bytes / 2}, DType::U8)});
  auto next = std::make_shared<size_t>(0);
  auto copy_once = [&copies, next](cudaStream_t) {
    auto& [to, from] = copies[(*next)++ % copies.size()];
    copy(to, from);
  };
  ladder::measure(results, p.name, double(p.bytes),
                  {{"plain", "a kernel for each operation", round_robin(p.plain)},
                   {"fused", "what the model runs", round_robin(p.fused)},
                   {"copy", "as many bytes", copy_once}});
}

std::vector<Problem> problems(const Flags& flags, DType type) {
  std::vector<Problem> all;
  for (const auto& some :
       {norm_problems(flags, type), layer_problems(flags, type),
        std::vector<Problem>{loss_problem(flags, type)}, step_problems(flags, type)})
    all.insert(all.end(), some.begin(), some.end());
  if (flags.only.empty()) return all;
  std::erase_if(all,
                [&](const Problem& p) { return p.name.find(flags.only) == std::string::npos; });
  require(!all.empty(), "--only ", flags.only, " is part of no operation's name");
  return all;
}

}  // namespace

int main(int argc, char** argv) {
  return run_main(argc, argv, [](int argc, char** argv) {
    Flags flags;
    CLI::App app("Times the memory-bound kernels of a training step beside a copy.");
    whole(app.add_option("--tokens", flags.tokens, "rows")->capture_default_str(), 1, 1 << 22);
    whole(app.add_option("--hidden", flags.hidden, "width")->capture_default_str(), 2, 1 << 15);
    whole(app.add_option("--ffn", flags.ffn, "width of SwiGLU")->capture_default_str(), 1, 1 << 17);
    whole(app.add_option("--heads", flags.heads, "of attention")->capture_default_str(), 1, 1024);
    whole(
        app.add_option("--vocabulary", flags.vocabulary, "logits of a row")->capture_default_str(),
        1, 1 << 20);
    word(app.add_option("--dtype", flags.type, "fp32 or bf16"), {"fp32", "bf16"});
    app.add_option("--only", flags.only, "operations with this in their name");
    app.add_flag("--check", flags.check, "compare plain and fused, and stop");
    output_file(app.add_option("--csv", flags.csv, "write the table to this file"));
    output_file(app.add_option("--svg", flags.svg, "draw it"));
    app.add_flag("--dry-run", flags.dry_run, "check the flags and stop");
    if (!parse_flags(app, argc, argv)) return 0;
    require(flags.hidden % (2 * flags.heads) == 0, "--hidden ", flags.hidden,
            " cannot be cut into ", flags.heads, " heads of an even size");
    DType type = choose_type(flags.type, Device::CUDA);
    std::vector<Problem> all = problems(flags, type);
    if (flags.dry_run) return 0;
    require(device::available(),
            "this program times kernels of a GPU, and there is none: ", device::why_not());

    Results results{"Memory-bound kernels on " + device::name(Device::CUDA), "TB/s", "copy", {}};
    for (const Problem& p : all) {
      std::vector<Tensors> sets;
      const int64_t enough = flags.check ? 0 : int64_t(1) << 30;
      for (int64_t taken = 0; sets.size() < 2 || taken < enough; taken += p.bytes)
        sets.push_back(p.make());
      p.plain(sets[0]);
      p.fused(sets[1]);
      compare(p, sets[0], sets[1], type);
      if (!flags.check) time(results, p, sets);
    }
    std::printf("plain and fused kernels agree\n");
    if (flags.check) return 0;
    std::printf("%s\n", results.title.c_str());
    print(results);
    if (!flags.csv.empty()) save_csv(results, flags.csv);
    if (!flags.svg.empty()) draw(results, flags.svg);
    return 0;
  });
}
