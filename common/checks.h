#pragma once
// What a parallel program can be asked to prove while it runs.
//
//   --check-replicas   after each step, all ranks' copies of every weight are the same bits
//   --check            for the first steps, loss, gradients and weights are those of one rank
//
// A parallel run that has gone wrong rarely stops: copies that have drifted apart, or gradients of
// half of the batch, still bring the loss down. These compare, and end the program if they must.

#include <memory>

#include "common/corpus.h"
#include "common/mesh.h"
#include "common/optim.h"
#include "common/options.h"

namespace lockstep {

struct CheckFlags {
  bool replicas = false, reference = false;
};
void add_check_flags(CLI::App& app, CheckFlags& flags);

// Throws, on all ranks, with the first parameter of which a rank's copy differs from rank 0's, and
// that rank. Weights are gathered and released unit by unit (ZeRO-3).
// Of weights that are replicated over the data axis, over TP, over both ends of a pipeline.
void check_replicas(const std::vector<Stage*>& chunks, DataParallel& parallel, ProcessMesh& mesh,
                    int64_t step);

// The same training on one rank, with nothing exchanged in its model. Every rank runs it beside its
// own work, on the whole global batch, and compares what it owns.
class Reference {
 public:
  Reference(const Options& options, const Corpus& corpus, const UpdateRule& rule);
  ~Reference();

  // Takes the step (counted from 1) too. Throws where the parallel run, which has just taken it,
  // differs by more than rounding explains.
  void step(int64_t step, const AdamW& parallel);

  // The largest differences so far: of losses and norms, relative; of gradients and weights, the
  // root mean square of a piece's difference over that of its tensor.
  struct Differences {
    double loss = 0, norm = 0, gradient = 0, weight = 0;
  };
  const Differences& largest() const { return largest_; }

 private:
  struct Run;
  std::shared_ptr<MemoryAccount> books_;  // of its own: programs say what the parallel run takes
  std::unique_ptr<Run> run_;
  Differences largest_, allowed_;
};

// Both, as the flags say.
class Checks {
 public:
  Checks(const CheckFlags& flags, const std::vector<Stage*>& chunks, DataParallel& parallel,
         ProcessMesh& mesh, const Options& options, const Corpus& corpus, const AdamW& optimizer);
  void step(int64_t step);  // has been taken, and published
  bool on() const { return flags_.replicas || reference_; }

 private:
  static constexpr int64_t kSteps = 10;  // that --check compares
  void conclude(int64_t steps);

  CheckFlags flags_;
  std::vector<Stage*> chunks_;
  DataParallel& parallel_;
  ProcessMesh& mesh_;
  const AdamW& optimizer_;
  std::unique_ptr<Reference> reference_;
  int64_t last_;
};

}  // namespace lockstep
