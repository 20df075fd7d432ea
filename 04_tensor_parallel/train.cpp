// Tensor parallelism: every matrix is cut over the ranks of a group, and they compute each layer
// together, on the same samples.
//
//   rank 0   half of the heads, half of the ffn columns, half of the vocabulary ┐ a sum after
//   rank 1   the other halves                                                   ┘ attention, one
//                                                                                 after the ffn
//   --tp N                  N ranks to a group; ranks / N groups are data parallel (--stage: 03)
//   --sequence-parallel     norms, dropout and residual sums on 1/N of the rows (g and g*)
//   --overlap C             matmuls in C chunks, each one's communication behind the next
//   --gather-again          backward gathers once more what forward did not keep
//
// Compared with 02_data_parallel/train.cpp, one line: use_tensor_parallel(). The program prints the
// shapes that every region of the model must have here, and stops if one comes out otherwise.
//
//     ./lockstep run 04 --ranks 2 --tp 2                              ranks as threads
//     ./lockstep run 04 -n 4 --tp 2 --sequence-parallel               as processes, over MPI
//     ./lockstep run 04 --ranks 2 --tp 2 --steps 10 --check           beside one rank

#include <CLI/CLI.hpp>

#include "01_single_gpu/recompute.h"
#include "03_zero/make_zero.h"
#include "03_zero/use_zero.h"
#include "04_tensor_parallel/shapes.h"
#include "04_tensor_parallel/use_tensor_parallel.h"
#include "08_kernels/use_matmul.h"
#include "common/launch_flags.h"
#include "common/plan.h"
#include "common/training.h"

using namespace lockstep;

struct Flags {
  int64_t tp = 2, stage = 0;
  TensorParallel how;
  CheckFlags checks;
};

static void train(Communicator& world, Options options, const Corpus& corpus, const Flags& flags) {
  int tp = int(flags.tp);
  check_divides("--tp", tp, world);
  check_tensor_parallel(options.config, options.sequence, tp, flags.how);
  ProcessMesh mesh(world, {.dp = world.size() / tp, .tp = tp}, options.config.kv_heads);
  settle_ranks(options, mesh);
  std::unique_ptr<DataParallel> parallel;
  Parts parts = plain_parts();
  parts.seed = options.seed;
  use_tensor_parallel(parts, mesh.tp(), flags.how);
  ShapeTable shapes(options.config, flags.how, parts.tp);
  watch_shapes(parts, shapes);
  use_recomputation(parts, options.recompute);
  use_zero(parts, parallel);
  Stage model(options.config, parts, options.compute, options.device);
  DataParallel::Settings settings{options.gradients};
  if (world.rank() == 0) {
    print_plan(options, corpus, memory_of_rank(int(flags.stage), {&model}, mesh, settings));
    shapes.print(options.micro_batch * options.sequence);
  }
  if (options.dry_run) return;
  parallel = make_zero(int(flags.stage), {&model}, mesh, settings);
  parallel->allocate();
  Training({mesh, options, corpus, {&model}, *parallel, flags.checks}).run();
}

int main(int argc, char** argv) {
  return run_main(argc, argv, [](int argc, char** argv) {
    Flags flags;
    Launch launch;
    auto more = [&](CLI::App& app) {
      whole(app.add_option("--tp", flags.tp, "ranks that share each matrix")->capture_default_str(),
            1, 1024);
      whole(
          app.add_option("--stage", flags.stage, "of ZeRO, over the groups")->capture_default_str(),
          0, 3);
      app.add_flag("--sequence-parallel", flags.how.sequence_parallel,
                   "outside of the cut matrices, ranks share the rows");
      whole(app.add_option("--overlap", flags.how.overlap,
                           "chunks whose communication hides behind matmuls; 0: none")
                ->capture_default_str(),
            0, 64);
      app.add_flag("--gather-again", flags.how.gather_again,
                   "in backward, instead of keeping what forward gathered");
      add_check_flags(app, flags.checks);
    };
    auto options = parse_training(argc, argv, "Trains a Llama-style model with tensor parallelism.",
                                  launch, more);
    if (!options) return 0;
    use_own_matmul(*options);  // --matmul ladder
    Corpus corpus = open_corpus(*options);
    return train_on_ranks(launch, *options,
                          [&](Communicator& world) { train(world, *options, corpus, flags); });
  });
}
