// Pipeline parallelism: each rank holds some of the layers, and micro-batches flow through them.
//
//   rank 0   layers 0-1   F0 F1 F2 F3 B0 ...     what a rank does when is a schedule, and a
//   rank 1   layers 2-3      F0 F1 F2 B0 ...     schedule is data: see timeline for its picture
//
//   --pp P              stages in a row (times --chunks); ranks / P pipelines are data parallel
//   --schedule NAME     afab, 1f1b, interleaved, zb-h1, zb-h2, zb-v, dualpipe-v
//   --balance           fewer layers beside the head, which costs as much as several
//
// Compared with 02_data_parallel/train.cpp: a rank builds its stages only, and Pipeline
// (pipeline.h) runs forward and backward in the schedule's order. At the end the program says how
// long ranks stood idle, beside the simulation of the schedule with the times it has measured.
//
//     ./lockstep run 06 --ranks 2 --pp 2 --schedule zb-h1             ranks as threads
//     ./lockstep run 06 -n 4 --pp 2 --schedule interleaved            as processes, over MPI
//     ./lockstep run 06 --ranks 2 --pp 2 --steps 10 --check           beside one rank

#include <CLI/CLI.hpp>

#include "01_single_gpu/recompute.h"
#include "03_zero/make_zero.h"
#include "03_zero/use_zero.h"
#include "06_pipeline_parallel/pipeline.h"
#include "06_pipeline_parallel/schedules.h"
#include "06_pipeline_parallel/split_layers.h"
#include "06_pipeline_parallel/stopwatch.h"
#include "08_kernels/use_matmul.h"
#include "common/evaluate.h"
#include "common/launch_flags.h"
#include "common/plan.h"
#include "common/training.h"

using namespace lockstep;

struct Flags {
  std::string schedule = "1f1b";
  int64_t pp = 2, chunks = 0, group = 0, stage = 0;
  bool balance = false;
  std::string svg;
  CheckFlags checks;
};

class PipelineTraining : public Training {
 public:
  PipelineTraining(const Job& job, Pipeline& pipeline, const Flags& flags)
      : Training(job), pipeline_(pipeline), flags_(flags) {}
  void report_idle() {
    if (!watch_.any()) return;
    Timeline measured = gather_timeline(job_.mesh, watch_.spans());
    if (speaks())
      show_idle(pipeline_.settings(), int(job_.options.accumulation()), measured, flags_.svg);
  }

 protected:
  void forward_backward(const StepBatch& batch, Span& part) override {
    part.next("pipeline");
    bool watched = ++steps_ == 4;  // the first steps are unlike all others
    if (watched) watch_.start(job_.mesh.pp(), job_.options.device);
    pipeline_.run(
        batch.micro_batches, optimizer_.scale(), one_,
        [this](const Tensor& loss) { optimizer_.add_loss(loss); },
        watched ? watch_.observer() : Pipeline::Observer());
  }
  double validation_loss() override {
    MeanLoss mean;
    std::vector<MicroBatch> batches = feed_.validation();
    pipeline_.evaluate(batches, one_, [&](const Tensor& loss) { mean.add(loss); });
    if (pipeline_.has_last_stage())
      for (const MicroBatch& batch : batches) mean.count(batch);
    return mean.over(&job_.mesh.world(), job_.options.device);
  }
  void show_sample() override {}  // a token at a time would leave all stages but one idle

 private:
  Pipeline& pipeline_;
  const Flags& flags_;
  Stopwatch watch_;
  int64_t steps_ = 0;
};

static void train(Communicator& world, Options options, const Corpus& corpus, const Flags& flags) {
  int pp = int(flags.pp);
  check_divides("--pp", pp, world);
  ProcessMesh mesh(world, {.dp = world.size() / pp, .pp = pp});
  settle_ranks(options, mesh);
  auto schedule = [&](int micro_batches) {
    return make_schedule(flags.schedule, pp, int(flags.chunks), micro_batches, int(flags.group));
  };
  Placement placement = schedule(int(options.accumulation())).placement;
  EndCosts ends = flags.balance ? end_costs(options.config, options.sequence) : EndCosts{};
  std::vector<StageSpan> spans = split_layers(options.config.layers, placement, ends);
  std::unique_ptr<DataParallel> parallel;
  Parts parts = plain_parts();
  parts.seed = options.seed;
  use_recomputation(parts, options.recompute);
  use_zero(parts, parallel);
  std::vector<std::unique_ptr<Stage>> stages =
      make_stages(options, parts, placement, mesh.pp().rank(), spans);
  std::vector<Stage*> chunks;
  for (auto& stage : stages) chunks.push_back(stage.get());
  DataParallel::Settings settings{options.gradients};
  if (world.rank() == 0) {
    print_plan(options, corpus, memory_of_rank(int(flags.stage), chunks, mesh, settings));
    print_stages(placement, spans);
  }
  if (options.dry_run) return;
  parallel = make_zero(int(flags.stage), chunks, mesh, settings);
  parallel->allocate();
  Pipeline pipeline(chunks, mesh.pp(), {placement, [&](int m) { return schedule(m).schedule; }});
  PipelineTraining training({mesh, options, corpus, chunks, *parallel, flags.checks}, pipeline,
                            flags);
  training.run();
  training.report_idle();
}

int main(int argc, char** argv) {
  return run_main(argc, argv, [](int argc, char** argv) {
    Flags flags;
    Launch launch;
    auto more = [&](CLI::App& app) {
      whole(app.add_option("--pp", flags.pp, "ranks in a pipeline")->capture_default_str(), 1,
            1024);
      word(
          app.add_option("--schedule", flags.schedule, "who does what when")->capture_default_str(),
          schedule_names());
      whole(app.add_option("--chunks", flags.chunks, "stages of a rank (default: the schedule's)"),
            0, 1024);
      whole(app.add_option("--group", flags.group,
                           "interleaved: micro-batches that visit a chunk in a row"),
            0, 1'000'000);
      app.add_flag("--balance", flags.balance, "place layers by cost: the head counts");
      whole(app.add_option("--stage", flags.stage, "of ZeRO, over the pipelines")
                ->capture_default_str(),
            0, 1);
      output_file(
          app.add_option("--svg", flags.svg, "draw planned and measured timeline into this file"));
      add_check_flags(app, flags.checks);
    };
    auto options =
        parse_training(argc, argv, "Trains a Llama-style model as a pipeline.", launch, more);
    if (!options) return 0;
    use_own_matmul(*options);  // --matmul ladder
    Corpus corpus = open_corpus(*options);
    return train_on_ranks(launch, *options,
                          [&](Communicator& world) { train(world, *options, corpus, flags); });
  });
}
