#include "common/training.h"

#include <cstdio>

#include "common/evaluate.h"
#include "common/plan.h"

namespace lockstep {

// First weights, then those of a checkpoint; then every copy is told.
static int64_t start(const Training::Job& job, Checkpoints& checkpoints) {
  start_weights(job.chunks, job.parallel.owned(), job.options, &job.mesh.data());
  int64_t done = checkpoints.resume();
  job.parallel.publish();
  return done;
}

Training::Training(const Job& job)
    : job_(job),
      feed_(job.corpus, job.options, {job.mesh.here().dp, job.mesh.shape().dp}),
      optimizer_(job.parallel.owned(), update_rule(job.options, feed_.steps()), job.options.device,
                 &job.mesh.world()),
      checkpoints_(job.options, job.corpus, optimizer_, feed_.steps(), &job.mesh.world()),
      done_(start(job, checkpoints_)),
      checks_(job.checks, job.chunks, job.parallel, job.mesh, job.options, job.corpus, optimizer_),
      report_(job.options, feed_.steps(), {job.mesh.world().rank(), job.mesh.world().size()}),
      meter_(ledger(), job.options.device) {
  trace_ = start_traces(job.mesh.world(), job.options.trace, job.options.profile,
                        job.options.device, checkpoints_.last_step() - done_);
  one_ = Tensor::empty({1}, sum_type(job.options.compute), job.options.device, Category::Buffers);
  on(one_).fill(one_, 1);
}

void Training::run() {
  const Options& options = job_.options;
  TraceScope scope(trace_.get());
  for (int64_t step = done_ + 1; step <= checkpoints_.last_step(); ++step) {
    Span part(trace_.get(), "data", Span::Kind::Data);
    take(step, part);
    look_around(step, part);
    part.end();
    if (trace_ && trace_->step())
      show_traces(job_.mesh.world(), trace_->recording(), options.trace, options.profile);
  }
  report_.finish();
  report_.summary();
  meter_.show(job_.mesh.world());
  export_weights(job_.parallel.owned(), options, &job_.mesh.world());
  show_sample();
  double loss = validation_loss();
  if (speaks()) std::printf("validation loss %.3f\n", loss);
}

void Training::take(int64_t step, Span& part) {
  StepBatch batch = feed_.step(step - 1);
  part.next("begin");
  job_.mesh.data().all_reduce(batch.valid).wait();
  ledger().clear();  // what follows is what the formulas speak of
  job_.parallel.begin_step(int64_t(batch.micro_batches.size()));
  optimizer_.begin_step(batch.valid);
  forward_backward(batch, part);
  part.next("sum");
  job_.parallel.finish();
  part.next("optimizer");
  optimizer_.step([this](size_t piece) { job_.parallel.updated(piece); });
  job_.parallel.publish();
  meter_.step();
  report_.step(step, optimizer_.state(), batch.tokens);
  taken(step, batch);
}

void Training::forward_backward(const StepBatch& batch, Span& part) {
  for (const MicroBatch& micro_batch : batch.micro_batches) {
    part.next("forward");
    Tape tape;
    Var hidden = model().forward(tape, micro_batch);
    Var loss = model().loss(tape, hidden, micro_batch, optimizer_.scale());
    if (adds_loss()) optimizer_.add_loss(loss.value);
    part.next("backward");
    tape.backward(loss, one_);
  }
}

void Training::look_around(int64_t step, Span& part) {
  const Options& options = job_.options;
  bool evaluates =
      options.evaluate_every > 0 && step % options.evaluate_every == 0 && step < feed_.steps();
  StepMeter::Pause pause(meter_, evaluates || checks_.on() || checkpoints_.due(step));
  checks_.step(step);
  part.next("evaluate");
  if (evaluates) report_.validation(step, validation_loss());
  if (checkpoints_.due(step)) {
    part.next("checkpoint");
    report_.finish();
    checkpoints_.save(step);
  }
}

double Training::validation_loss() {
  return evaluate(model(), feed_.validation(), &job_.mesh.data());
}

int train_on_ranks(const Launch& launch, const Options& options,
                   const std::function<void(Communicator& world)>& body) {
  std::optional<TracedKernels> traced;  // before there are threads that compute
  if (!options.trace.empty() || options.profile) traced.emplace();
  return run_ranks(launch, body);
}

void Training::show_sample() {
  Communicator* tp = job_.mesh.tp().size() > 1 ? &job_.mesh.tp() : nullptr;
  lockstep::show_sample(model(), job_.corpus, job_.options, speaks(), tp);
}

}  // namespace lockstep
