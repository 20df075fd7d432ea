// Data parallelism: every rank has the whole model and takes other samples of each step's batch.
//
//   rank 0   samples 0 1 ─▶ forward, backward ─▶ gradient ┐         ┌▶ step ┐
//   rank 1   samples 2 3 ─▶ forward, backward ─▶ gradient ┼─▶ sum ──┼▶ step ┼ the same weights
//   rank 2   samples 4 5 ─▶ forward, backward ─▶ gradient ┘         └▶ step ┘ everywhere
//
// Compared with 01_single_gpu/train.cpp: a rank feeds itself with its share of the batch, all agree
// on the number of valid tokens before the first loss, and finish() sums the gradients. When the
// sum starts, and of how much at once, is the difference between
//
//     --sync naive        after backward, one gradient after the other       naive.h
//     --sync overlapped   each as soon as backward has finished it           overlapped.h
//     --sync bucketed     25 MB at once, as soon as they are there           bucketed.h
//
//     ./lockstep run 02 --ranks 2                        ranks as threads
//     ./lockstep run 02 -n 2 --sync naive                as processes, over MPI
//     ./lockstep run 02 --ranks 2 --steps 10 --check     beside the same training on one rank

#include <CLI/CLI.hpp>
#include <cstdio>

#include "01_single_gpu/recompute.h"
#include "02_data_parallel/bucketed.h"
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
  std::string sync = "bucketed";
  double bucket_mb = 25;
  CheckFlags checks;
};

static std::unique_ptr<DataParallel> make_parallel(const Flags& flags, Stage& model,
                                                   ProcessMesh& mesh, DType gradients) {
  DataParallel::Settings settings{gradients, int64_t(flags.bucket_mb * 1e6)};
  std::vector<Stage*> chunks = {&model};
  if (flags.sync == "naive") return std::make_unique<Naive>(chunks, mesh, settings);
  if (flags.sync == "overlapped") return std::make_unique<Overlapped>(chunks, mesh, settings);
  return std::make_unique<Bucketed>(chunks, mesh, settings);
}

static void train(Communicator& world, Options options, const Corpus& corpus, const Flags& flags) {
  ProcessMesh mesh(world, {.dp = world.size()});
  settle_ranks(options, mesh);
  const Cut data{mesh.data().rank(), mesh.data().size()};
  const bool speaks = world.rank() == 0;
  if (speaks) print_plan(options, corpus);
  if (options.dry_run) return;

  Parts parts = plain_parts();
  parts.seed = options.seed;
  use_recomputation(parts, options.recompute);
  Stage model(options.config, parts, options.compute, options.device);
  std::unique_ptr<DataParallel> parallel = make_parallel(flags, model, mesh, options.gradients);
  parallel->allocate();
  start_weights(model, parallel->owned(), options, &mesh.data());

  Feed feed(corpus, options, data);
  AdamW optimizer(parallel->owned(), update_rule(options, feed.steps()), options.device, &world);
  Checkpoints checkpoints(options, corpus, optimizer, feed.steps(), &world);
  int64_t done = checkpoints.resume();
  Checks checks(flags.checks, model, *parallel, mesh, options, corpus, optimizer);
  Report report(options, feed.steps(), data);
  auto trace = start_traces(world, options.trace, options.profile, options.device,
                            checkpoints.last_step() - done);
  TraceScope scope(trace.get());
  StepMeter meter(mesh.data(), options.device);
  Tensor one = Tensor::empty({1}, sum_type(options.compute), options.device, Category::Buffers);
  on(one).fill(one, 1);

  for (int64_t step = done + 1; step <= checkpoints.last_step(); ++step) {
    world.ledger().clear();  // or it would grow for as long as the run does
    Span part(trace.get(), "data", Span::Kind::Data);
    StepBatch batch = feed.step(step - 1);
    part.next("begin");
    mesh.data().all_reduce(batch.valid).wait();
    parallel->begin_step(int64_t(batch.micro_batches.size()));
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
    optimizer.step();
    parallel->publish();
    meter.step();
    report.step(step, optimizer.state(), batch.tokens);

    bool evaluates =
        options.evaluate_every > 0 && step % options.evaluate_every == 0 && step < feed.steps();
    StepMeter::Pause pause(meter, evaluates || checks.on() || checkpoints.due(step));
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
      word(app.add_option("--sync", flags.sync, "naive, overlapped or bucketed")
               ->capture_default_str(),
           {"naive", "overlapped", "bucketed"});
      real(app.add_option("--bucket-mb", flags.bucket_mb, "gradients that are summed at once")
               ->capture_default_str(),
           0, 1e6, true);
      add_check_flags(app, flags.checks);
    };
    auto options =
        parse_training(argc, argv, "Trains a Llama-style model on several ranks.", launch, more);
    if (!options) return 0;
    Corpus corpus = open_corpus(*options);
    std::optional<TracedKernels> traced;  // before there are threads that compute
    if (!options->trace.empty() || options->profile) traced.emplace();
    return run_ranks(launch, [&](Communicator& world) { train(world, *options, corpus, flags); });
  });
}
