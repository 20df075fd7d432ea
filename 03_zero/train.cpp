// ZeRO: data parallelism in which ranks share out what they otherwise all hold alike.
//
//                      optimizer      gradients      weights        a step of m micro-batches moves
//   --stage 0          everywhere     everywhere     everywhere     2Ψ            02_data_parallel
//   --stage 1          1/N each       everywhere     everywhere     2Ψ            zero1.h
//   --stage 2          1/N each       1/N each       everywhere     (m + 1)Ψ      zero2.h
//   --stage 3          1/N each       1/N each       1/N each       3mΨ           zero3.h
//
// Compared with 02_data_parallel/train.cpp: every unit of the model asks for its weights before it
// computes (use_zero), and the optimizer says which piece is updated, so that it can travel while
// later ones wait. After the first steps the program prints what each rank holds and what has
// moved, beside the formulas (accounts.h).
//
//     ./lockstep run 03 --ranks 4 --stage 3              ranks as threads
//     ./lockstep run 03 -n 2 --stage 2                   as processes, over MPI
//     ./lockstep run 03 --ranks 2 --steps 10 --check     beside the same training on one rank

#include <CLI/CLI.hpp>
#include <cstdio>

#include "01_single_gpu/recompute.h"
#include "02_data_parallel/bucketed.h"
#include "03_zero/accounts.h"
#include "03_zero/use_zero.h"
#include "03_zero/zero3.h"
#include "common/checks.h"
#include "common/evaluate.h"
#include "common/feed.h"
#include "common/launch_flags.h"
#include "common/plan.h"
#include "common/report.h"
#include "common/resume.h"
#include "common/step_meter.h"
#include "common/trace_ranks.h"

using namespace lockstep;

struct Flags {
  int64_t stage = 1;
  std::string gather = "forward";  // where stages 1 and 2 hide the gather of the new weights
  double bucket_mb = 25;
  CheckFlags checks;
};

static std::unique_ptr<DataParallel> make_parallel(const Flags& flags, Stage& model,
                                                   ProcessMesh& mesh,
                                                   DataParallel::Settings settings) {
  std::vector<Stage*> chunks = {&model};
  auto gather =
      flags.gather == "forward" ? Zero1::Gather::DuringForward : Zero1::Gather::DuringOptimizer;
  switch (flags.stage) {
    case 0: return std::make_unique<Bucketed>(chunks, mesh, settings);
    case 1: return std::make_unique<Zero1>(chunks, mesh, settings, gather);
    case 2: return std::make_unique<Zero2>(chunks, mesh, settings, gather);
    default: return std::make_unique<Zero3>(chunks, mesh, settings);
  }
}

static void train(Communicator& world, Options options, const Corpus& corpus, const Flags& flags) {
  ProcessMesh mesh(world, {.dp = world.size()});
  settle_ranks(options, mesh);
  const Cut data{mesh.data().rank(), mesh.data().size()};
  const bool speaks = world.rank() == 0;

  std::unique_ptr<DataParallel> parallel;  // the model's units ask it for their weights
  Parts parts = plain_parts();
  parts.seed = options.seed;
  use_recomputation(parts, options.recompute);
  use_zero(parts, parallel);
  Stage model(options.config, parts, options.compute, options.device);
  DataParallel::Settings settings{options.gradients, int64_t(flags.bucket_mb * 1e6)};
  ZeroPlan plan(model, int(flags.stage), settings, data);
  if (speaks) print_plan(options, corpus, plan.memory());
  if (options.dry_run) return;
  parallel = make_parallel(flags, model, mesh, settings);
  parallel->allocate();
  start_weights(model, parallel->owned(), options, &mesh.data());

  Feed feed(corpus, options, data);
  AdamW optimizer(parallel->owned(), update_rule(options, feed.steps()), options.device, &world);
  Checkpoints checkpoints(options, corpus, optimizer, feed.steps(), &world);
  int64_t done = checkpoints.resume();
  parallel->publish();  // the first weights
  Checks checks(flags.checks, model, *parallel, mesh, options, corpus, optimizer);
  Report report(options, feed.steps(), data);
  auto trace = start_traces(world, options.trace, options.profile, options.device,
                            checkpoints.last_step() - done);
  TraceScope scope(trace.get());
  StepMeter meter(mesh.data(), options.device);
  Tensor one = Tensor::empty({1}, sum_type(options.compute), options.device, Category::Buffers);
  on(one).fill(one, 1);

  const int64_t shows = std::min(done + 2, checkpoints.last_step());
  for (int64_t step = done + 1; step <= checkpoints.last_step(); ++step) {
    Span part(trace.get(), "data", Span::Kind::Data);
    StepBatch batch = feed.step(step - 1);
    int64_t micro_batches = int64_t(batch.micro_batches.size());
    part.next("begin");
    mesh.data().all_reduce(batch.valid).wait();
    world.ledger().clear();  // what follows, up to publish(), is what the formulas speak of
    parallel->begin_step(micro_batches);
    optimizer.begin_step(batch.valid);
    for (const MicroBatch& micro_batch : batch.micro_batches) {
      part.next("forward");
      Tape tape;
      Var hidden = model.forward(tape, micro_batch);
      Var loss = model.loss(tape, hidden, micro_batch, optimizer.scale());
      optimizer.add_loss(loss.value);
      part.next("backward");
      tape.backward(loss, one);
    }
    part.next("sum");
    parallel->finish();
    part.next("optimizer");
    optimizer.step([&](size_t piece) { parallel->updated(piece); });
    parallel->publish();
    meter.step();
    report.step(step, optimizer.state(), batch.tokens);

    bool evaluates =
        options.evaluate_every > 0 && step % options.evaluate_every == 0 && step < feed.steps();
    StepMeter::Pause pause(meter,
                           evaluates || step == shows || checks.on() || checkpoints.due(step));
    if (step == shows)
      show_accounts(world, options.device, plan, mesh.data().name(), micro_batches);
    checks.step(step);
    part.next("evaluate");
    if (evaluates) report.validation(step, evaluate(model, feed.validation(), &mesh.data()));
    if (checkpoints.due(step)) {
      part.next("checkpoint");
      report.finish();
      checkpoints.save(step);
    }
    part.end();
    if (trace && trace->step())
      show_traces(world, trace->recording(), options.trace, options.profile, options.device);
  }
  report.finish();
  report.summary();
  if (speaks) meter.show();
  export_weights(model, *parallel, options, speaks);

  show_sample(model, corpus, options, speaks);
  double loss = evaluate(model, feed.validation(), &mesh.data());
  if (speaks) std::printf("validation loss %.3f\n", loss);
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
                          "during the next forward (optimizer, forward)")
               ->capture_default_str(),
           {"optimizer", "forward"});
      real(app.add_option("--bucket-mb", flags.bucket_mb, "gradients that are summed at once")
               ->capture_default_str(),
           0, 1e6, true);
      add_check_flags(app, flags.checks);
    };
    auto options =
        parse_training(argc, argv, "Trains a Llama-style model with ZeRO.", launch, more);
    if (!options) return 0;
    Corpus corpus = open_corpus(*options);
    std::optional<TracedKernels> traced;  // before there are threads that compute
    if (!options->trace.empty() || options->profile) traced.emplace();
    return run_ranks(launch, [&](Communicator& world) { train(world, *options, corpus, flags); });
  });
}
