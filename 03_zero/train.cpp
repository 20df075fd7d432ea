// ZeRO: data parallelism in which ranks share out what they otherwise all hold alike.
//
//                      optimizer      gradients      weights        a step of m micro-batches moves
//   --stage 0          everywhere     everywhere     everywhere     2Ψ            02_data_parallel
//   --stage 1          1/N each       everywhere     everywhere     2Ψ            zero1.h
//   --stage 2          1/N each       1/N each       everywhere     (m + 1)Ψ      zero2.h
//   --stage 3          1/N each       1/N each       1/N each       3mΨ           zero3.h
//
// Compared with 02_data_parallel/train.cpp: every unit of the model asks for its weights before it
// computes (use_zero). After the first steps the program prints what each rank holds and what has
// moved, beside the formulas (accounts.h).
//
//     ./lockstep run 03 --ranks 4 --stage 3              ranks as threads
//     ./lockstep run 03 -n 2 --stage 2                   as processes, over MPI
//     ./lockstep run 03 --ranks 2 --steps 10 --check     beside the same training on one rank

#include <CLI/CLI.hpp>

#include "01_single_gpu/recompute.h"
#include "03_zero/accounts.h"
#include "03_zero/make_zero.h"
#include "03_zero/use_zero.h"
#include "08_kernels/use_matmul.h"
#include "common/launch_flags.h"
#include "common/plan.h"
#include "common/training.h"

using namespace lockstep;

struct Flags {
  int64_t stage = 1;
  std::string gather;  // where stages 1 and 2 hide the gather of the new weights
  std::optional<double> bucket_mb;
  CheckFlags checks;
};

// Tells once what every rank holds and what a step has moved.
class ZeroTraining : public Training {
 public:
  ZeroTraining(const Job& job, const ZeroPlan& plan) : Training(job), plan_(plan) {}

 protected:
  void taken(int64_t step, const StepBatch& batch) override {
    if (step != std::min(done_ + 2, checkpoints_.last_step())) return;
    show_accounts(job_.mesh.world(), plan_, job_.mesh.data().name(),
                  int64_t(batch.micro_batches.size()));
  }

 private:
  const ZeroPlan& plan_;
};

static void train(Communicator& world, Options options, const Corpus& corpus, const Flags& flags) {
  ProcessMesh mesh(world, {.dp = world.size()});
  settle_ranks(options, mesh);

  std::unique_ptr<DataParallel> parallel;  // the model's units ask it for their weights
  Parts parts = plain_parts();
  parts.seed = options.seed;
  use_recomputation(parts, options.recompute);
  use_zero(parts, parallel);
  Stage model(options.config, parts, options.compute, options.device);
  DataParallel::Settings settings{options.gradients};
  if (flags.bucket_mb) settings.bucket_bytes = int64_t(*flags.bucket_mb * 1e6);
  ZeroPlan plan(model, int(flags.stage), settings, {mesh.data().rank(), mesh.data().size()});
  if (world.rank() == 0) print_plan(options, corpus, plan.memory());
  if (options.dry_run) return;
  auto gather =
      flags.gather == "optimizer" ? Zero1::Gather::DuringOptimizer : Zero1::Gather::DuringForward;
  parallel = make_zero(int(flags.stage), {&model}, mesh, settings, gather);
  parallel->allocate();
  ZeroTraining({mesh, options, corpus, {&model}, *parallel, flags.checks}, plan).run();
}

int main(int argc, char** argv) {
  return run_main(argc, argv, [](int argc, char** argv) {
    Flags flags;
    Launch launch;
    auto more = [&](CLI::App& app) {
      whole(app.add_option("--stage", flags.stage,
                           "0: nothing is shared out, 1: the optimizer's "
                           "state, 2: gradients too, 3: weights too")
                ->capture_default_str(),
            0, 3);
      word(app.add_option("--gather", flags.gather,
                          "stages 1 and 2: new weights travel during the optimizer's step, or "
                          "during the next forward (optimizer, forward; default: forward)"),
           {"optimizer", "forward"});
      real(app.add_option("--bucket-mb", flags.bucket_mb,
                          text("stages 0 to 2: gradients that are summed at once (default: ",
                               DataParallel::kBucketMb, ")")),
           0, 1e6, true);
      add_check_flags(app, flags.checks);
    };
    auto options =
        parse_training(argc, argv, "Trains a Llama-style model with ZeRO.", launch, more);
    if (!options) return 0;
    require(flags.gather.empty() || flags.stage == 1 || flags.stage == 2,
            "--gather is for stages 1 and 2, not --stage ", flags.stage);
    require(!flags.bucket_mb || flags.stage < 3,
            "--bucket-mb is for stages 0 to 2: in stage 3 a unit travels as one");
    use_own_matmul(*options);  // --matmul ladder
    Corpus corpus = open_corpus(*options);
    return train_on_ranks(launch, *options,
                          [&](Communicator& world) { train(world, *options, corpus, flags); });
  });
}
