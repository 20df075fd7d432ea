// Climbs a ladder: checks every rung on odd sizes, then times all of them side by side.
//
//     ./lockstep run 08 ladder                            the bf16 matmul at 4096^3
//     ./lockstep run 08 ladder --size 8192 --csv out.csv --svg out.svg
//     ./lockstep run 08 ladder --check                    correctness alone, all ops and outputs
//     ./lockstep run 08 ladder --training                 the last rung on a training step's shapes
//     ./lockstep run 08 ladder --fp32                     the fp32 matmul, beside cuBLAS (no TF32)

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "08_kernels/bf16_ladder.h"
#include "08_kernels/rung.h"
#include "08_kernels/sgemm.h"
#include "common/command_line.h"
#include "common/device.h"

using namespace lockstep;
using namespace lockstep::ladder;

namespace {

struct Flags {
  std::string csv, svg;
  int64_t size = 4096, tokens = 16384;
  bool fp32 = false, check = false, training = false, dry_run = false;
};

// Every rung on every odd size it takes; prints what is wrong and returns whether nothing is.
bool all_right(const std::vector<MatmulRung>& rungs, DType in) {
  bool right = true;
  for (const MatmulRung& rung : rungs)
    for (const Shape& s : odd_sizes())
      for (DType out : {DType::BF16, DType::F32})
        for (float beta : {0.0f, 1.0f})
          for (auto [ta, tb] :
               {std::pair{Op::N, Op::T}, {Op::N, Op::N}, {Op::T, Op::N}, {Op::T, Op::T}}) {
            Matmul p{s[0], s[1], s[2], ta, tb, in, out, beta};
            if (!rung.takes(p)) continue;
            std::string complaint = complaint_about(rung, p);
            if (!complaint.empty()) std::printf("WRONG: %s\n", complaint.c_str()), right = false;
          }
  return right;
}

void time_problem(Results& results, const std::vector<MatmulRung>& rungs, const Matmul& shape) {
  RandomMatmul matmul(shape);
  const Matmul& p = matmul.problem();
  std::vector<Run> runs;
  for (const MatmulRung& rung : rungs)
    if (rung.takes(p))
      runs.push_back({rung.name, rung.idea, [&](cudaStream_t s) { rung.launch(p, s); }});
  measure(results, name_of(p), p.flops(), runs);
}

double geometric_mean(const std::vector<double>& shares) {
  double sum = 0;
  for (double share : shares) sum += std::log(share);
  return std::exp(sum / double(shares.size()));
}

// The linear layers of the 1.7B model: [inputs, outputs] of qkv, attention output, gate|up, down
// and head, each forward, for the gradient of its input and for that of its weight. The last rung
// that this GPU runs, and the library.
void time_training(Results& results, std::vector<MatmulRung> rungs, int64_t tokens) {
  const int64_t h = 2048, ffn = 8192, vocabulary = 49152;
  const Matmul usual{4096, 4096, 4096, Op::N, Op::T};
  while (!rungs[rungs.size() - 2].takes(usual)) rungs.erase(rungs.end() - 2);
  rungs.erase(rungs.begin(), rungs.end() - 2);
  std::vector<double> shares, chosen;  // chosen: where --matmul ladder uses the last rung
  auto time = [&](const Matmul& p) {
    time_problem(results, rungs, p);
    shares.push_back(results.rows[results.rows.size() - 2].share);
    if (worth_it(RandomMatmul(p).problem())) chosen.push_back(shares.back());
  };
  for (auto [in, out] : {std::pair{h, 3 * h}, {h, h}, {h, 2 * ffn}, {ffn, h}, {h, vocabulary}}) {
    time({tokens, out, in, Op::N, Op::T});
    time({tokens, in, out, Op::N, Op::N});
    time({out, in, tokens, Op::T, Op::N, DType::BF16, DType::F32, 1});
  }
  std::printf("geometric mean of the last rung's share: %.3f\n", geometric_mean(shares));
  if (!chosen.empty())
    std::printf("of the %d products for which --matmul ladder uses it: %.3f, at least %.3f\n",
                int(chosen.size()), geometric_mean(chosen),
                *std::min_element(chosen.begin(), chosen.end()));
}

}  // namespace

int main(int argc, char** argv) {
  return run_main(argc, argv, [](int argc, char** argv) {
    Flags flags;
    CLI::App app("Times the rungs of a matmul beside the library.");
    CLI::Option* fp32 =
        app.add_flag("--fp32", flags.fp32, "the ladder of fp32, from a first kernel on");
    CLI::Option* check = app.add_flag("--check", flags.check, "only check");
    CLI::Option* training =
        app.add_flag("--training", flags.training, "the shapes of a training step, in bf16")
            ->excludes(fp32)
            ->excludes(check);
    whole(app.add_option("--size", flags.size, "rows, columns and depth")
              ->capture_default_str()
              ->excludes(training)
              ->excludes(check),
          1, 65536);
    whole(app.add_option("--tokens", flags.tokens, "of that step's micro-batch")
              ->capture_default_str()
              ->needs(training),
          1, 1 << 20);
    output_file(
        app.add_option("--csv", flags.csv, "write the table to this file")->excludes(check));
    output_file(app.add_option("--svg", flags.svg, "draw it")->excludes(check));
    app.add_flag("--dry-run", flags.dry_run, "check the flags and stop");
    if (!parse_flags(app, argc, argv) || flags.dry_run) return 0;
    require(device::available(),
            "this program times a GPU's kernels, and there is none: ", device::why_not());

    DType in = flags.fp32 ? DType::F32 : DType::BF16;
    std::vector<MatmulRung> rungs = flags.fp32 ? fp32_ladder() : bf16_ladder();
    if (!all_right(rungs, in)) return 1;
    std::printf("all rungs are right on all odd sizes that they take\n");
    if (flags.check) return 0;
    rungs.push_back(flags.fp32 ? cublas_sgemm() : cublaslt());
    Results results{text(flags.fp32 ? "fp32" : "bf16", " matmul on ", device::name(Device::CUDA)),
                    "TFLOP/s",
                    flags.fp32 ? "cuBLAS" : "cuBLASLt",
                    {}};
    if (flags.training)
      time_training(results, rungs, flags.tokens);
    else
      time_problem(results, rungs,
                   {flags.size, flags.size, flags.size, Op::N, flags.fp32 ? Op::N : Op::T, in, in});
    print(results);
    if (!flags.csv.empty()) save_csv(results, flags.csv);
    if (!flags.svg.empty()) draw(results, flags.svg);
    return 0;
  });
}
