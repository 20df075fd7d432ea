// Data parallelism: every rank has the whole model and takes other samples of each step's batch.
//
//   rank 0   samples 0 1 ─▶ forward, backward ─▶ gradient ┐         ┌▶ step ┐
//   rank 1   samples 2 3 ─▶ forward, backward ─▶ gradient ┼─▶ sum ──┼▶ step ┼ the same weights
//   rank 2   samples 4 5 ─▶ forward, backward ─▶ gradient ┘         └▶ step ┘ everywhere
//
// The loop is common/training.h. Compared with 01_single_gpu/train.cpp, a rank feeds itself with
// its share of the batch, all agree on the number of valid tokens before the first loss, and
// finish() sums the gradients. When the sum starts, and of how much at once, is the difference
// between
//
//     --sync naive        after backward, one gradient after the other       naive.h
//     --sync overlapped   each as soon as backward has finished it           overlapped.h
//     --sync bucketed     25 MB at once, as soon as they are there           bucketed.h
//
//     ./lockstep run 02 --ranks 2                        ranks as threads
//     ./lockstep run 02 -n 2 --sync naive                as processes, over MPI
//     ./lockstep run 02 --ranks 2 --steps 10 --check     beside the same training on one rank

#include <CLI/CLI.hpp>

#include "01_single_gpu/recompute.h"
#include "02_data_parallel/bucketed.h"
#include "08_kernels/use_matmul.h"
#include "common/launch_flags.h"
#include "common/plan.h"
#include "common/training.h"

using namespace lockstep;

struct Flags {
  std::string sync = "bucketed";
  std::optional<double> bucket_mb;
  CheckFlags checks;
};

static std::unique_ptr<DataParallel> make_parallel(const Flags& flags, Stage& model,
                                                   ProcessMesh& mesh, DType gradients) {
  DataParallel::Settings settings{gradients};
  if (flags.bucket_mb) settings.bucket_bytes = int64_t(*flags.bucket_mb * 1e6);
  std::vector<Stage*> chunks = {&model};
  if (flags.sync == "naive") return std::make_unique<Naive>(chunks, mesh, settings);
  if (flags.sync == "overlapped") return std::make_unique<Overlapped>(chunks, mesh, settings);
  return std::make_unique<Bucketed>(chunks, mesh, settings);
}

static void train(Communicator& world, Options options, const Corpus& corpus, const Flags& flags) {
  ProcessMesh mesh(world, {.dp = world.size()});
  settle_ranks(options, mesh);
  if (world.rank() == 0) print_plan(options, corpus);
  if (options.dry_run) return;

  Parts parts = plain_parts();
  parts.seed = options.seed;
  use_recomputation(parts, options.recompute);
  Stage model(options.config, parts, options.compute, options.device);
  std::unique_ptr<DataParallel> parallel = make_parallel(flags, model, mesh, options.gradients);
  parallel->allocate();
  Training({mesh, options, corpus, {&model}, *parallel, flags.checks}).run();
}

int main(int argc, char** argv) {
  return run_main(argc, argv, [](int argc, char** argv) {
    Flags flags;
    Launch launch;
    auto more = [&](CLI::App& app) {
      word(app.add_option("--sync", flags.sync, "naive, overlapped or bucketed")
               ->capture_default_str(),
           {"naive", "overlapped", "bucketed"});
      real(app.add_option("--bucket-mb", flags.bucket_mb,
                          text("bucketed: gradients that are summed at once (default: ",
                               DataParallel::kBucketMb, ")")),
           0, 1e6, true);
      add_check_flags(app, flags.checks);
    };
    auto options =
        parse_training(argc, argv, "Trains a Llama-style model on several ranks.", launch, more);
    if (!options) return 0;
    require(!flags.bucket_mb || flags.sync == "bucketed",
            "--bucket-mb is for --sync bucketed, not ", flags.sync);
    use_own_matmul(*options);  // --matmul ladder
    Corpus corpus = open_corpus(*options);
    return train_on_ranks(launch, *options,
                          [&](Communicator& world) { train(world, *options, corpus, flags); });
  });
}
