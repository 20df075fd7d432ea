#pragma once
// The loop of 01_single_gpu/train.cpp on any number of ranks. A chapter builds its part of the
// model and a strategy for the data axis; the rest of a step is the same in all of them:
//
//   feed       this rank's micro-batches; all ranks agree on the number of valid tokens
//   forward, backward                              what a pipeline does in its own order
//   finish     gradients are summed over the job   (most of it while backward was under way)
//   step       every rank updates what it owns
//   publish    every copy of a weight is told
//
// Around it: checks, evaluation, checkpoints, the report, and how much of the communication the
// ranks stood still for.

#include "common/checks.h"
#include "common/feed.h"
#include "common/mesh.h"
#include "common/ranks.h"
#include "common/report.h"
#include "common/resume.h"
#include "common/step_meter.h"
#include "common/trace_ranks.h"

namespace lockstep {

class Training {
 public:
  // What all of a rank's training is about; everything lives longer than the Training.
  struct Job {
    ProcessMesh& mesh;
    const Options& options;
    const Corpus& corpus;
    std::vector<Stage*> chunks;  // one stage, or a rank's part of a pipeline
    DataParallel& parallel;      // allocated
    CheckFlags checks = {};
  };
  explicit Training(const Job& job);
  virtual ~Training() = default;
  void run();

 protected:
  // Of all micro-batches of a step. Losses are added on one of the ranks that know the same.
  virtual void forward_backward(const StepBatch& batch, Span& part);
  virtual double validation_loss();
  virtual void show_sample();
  virtual void taken(int64_t /*step*/, const StepBatch&) {}  // a step: what is there to tell of it?

  bool speaks() const { return job_.mesh.world().rank() == 0; }
  bool adds_loss() const { return job_.mesh.here().tp == 0; }
  Stage& model() { return *job_.chunks[0]; }
  Ledger& ledger() { return job_.mesh.world().ledger(); }

  Job job_;
  Feed feed_;
  AdamW optimizer_;
  Checkpoints checkpoints_;
  int64_t done_;  // steps of an earlier run
  std::unique_ptr<Trace> trace_;
  Tensor one_;

 private:
  void take(int64_t step, Span& part);
  void look_around(int64_t step, Span& part);

  Checks checks_;
  Report report_;
  StepMeter meter_;
};

// run_ranks() for programs that train.
int train_on_ranks(const Launch& launch, const Options& options,
                   const std::function<void(Communicator& world)>& body);

}  // namespace lockstep
