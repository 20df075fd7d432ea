// Training on one device. Everything else in Lockstep spreads these few lines over more of them.
//
//     for each step                                          bytes that live on
//       forward    predict every next token  ─▶ loss         activations, until backward used them
//       backward   loss ─▶ a gradient for every weight       gradients, summed over micro-batches
//       clip       no step longer than the norm allows
//       step       AdamW moves every weight a little         weights, moments (and fp32 masters)
//
// A step's batch may be larger than what fits at once: it is cut into micro-batches whose gradients
// add up (gradient accumulation). Each micro-batch's loss is already divided by the valid tokens of
// the whole step, so the sum is the same however the batch is cut.
//
//     ./lockstep train                                  two minutes on a laptop: C++ headers
//     ./lockstep train --data my.txt --steps 1000       any text
//     ./lockstep train --checkpoint run --checkpoint-every 100      and after a crash: --resume

#include <cstdio>

#include "01_single_gpu/recompute.h"
#include "08_kernels/use_matmul.h"
#include "common/diagnose.h"
#include "common/evaluate.h"
#include "common/feed.h"
#include "common/plan.h"
#include "common/report.h"
#include "common/resume.h"

using namespace lockstep;

static void train(const Options& options, const Corpus& corpus) {
  Parts parts = plain_parts();
  parts.seed = options.seed;
  use_recomputation(parts, options.recompute);
  Stage model(options.config, parts, options.compute, options.device);
  DataParallel parallel({&model}, {.gradients = options.gradients});
  parallel.allocate();
  start_weights({&model}, parallel.owned(), options);

  Feed feed(corpus, options);
  AdamW optimizer(parallel.owned(), update_rule(options, feed.steps()), options.device);
  Checkpoints checkpoints(options, corpus, optimizer, feed.steps());
  int64_t done = checkpoints.resume();
  Report report(options, feed.steps());
  auto trace =
      start_trace(options.trace, options.profile, options.device, checkpoints.last_step() - done);
  TraceScope scope(trace.get());
  Tensor one = Tensor::empty({1}, sum_type(options.compute), options.device);
  on(one).fill(one, 1);

  for (int64_t step = done + 1; step <= checkpoints.last_step(); ++step) {
    Span part(trace.get(), "data", Span::Kind::Data);  // the name of what follows, in a trace
    StepBatch batch = feed.step(step - 1);
    part.next("begin");
    parallel.begin_step(int64_t(batch.micro_batches.size()));
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
    part.next("optimizer");
    parallel.finish();
    optimizer.step();
    parallel.publish();
    report.step(step, optimizer.state(), batch.tokens);

    part.next("evaluate");
    bool evaluates = options.evaluate_every > 0 && step % options.evaluate_every == 0;
    if (evaluates && step < feed.steps())
      report.validation(step, evaluate(model, feed.validation()));
    if (checkpoints.due(step)) {
      part.next("checkpoint");
      report.finish();  // the log has every step that a checkpoint has
      checkpoints.save(step);
    }
    part.end();
    if (trace && trace->step()) show_trace(trace->recording(), options.trace, options.profile);
  }
  report.finish();
  report.summary();
  export_weights(parallel.owned(), options);

  show_sample(model, corpus, options);
  std::printf("validation loss %.3f\n", evaluate(model, feed.validation()));
}

int main(int argc, char** argv) {
  return run_main(argc, argv, [](int argc, char** argv) {
    auto options = parse_options(argc, argv, "Trains a Llama-style model on one device.");
    if (!options) return 0;
    use_own_matmul(*options);  // --matmul ladder
    Corpus corpus = open_corpus(*options);
    print_plan(*options, corpus);
    if (!options->dry_run) train(*options, corpus);
    return 0;
  });
}
