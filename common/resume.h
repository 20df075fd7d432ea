#pragma once
// How a program uses checkpoints: --checkpoint DIR --checkpoint-every N --keep N, --resume and
// --stop-after N; and --export DIR, the model that comes out.

#include "common/checkpoint.h"
#include "common/corpus.h"
#include "common/options.h"

namespace lockstep {

class Checkpoints {
 public:
  // Refuses a directory that cannot be written, or that holds another run, before any work. world:
  // of a job of several ranks, which all do the same at the same time and see the same directory.
  Checkpoints(const Options& options, const Corpus& corpus, AdamW& optimizer, int64_t steps,
              Communicator* world = nullptr);

  // How many steps are done: those of the newest checkpoint, which is loaded, or none.
  int64_t resume();
  int64_t last_step() const;  // of this program: the run's last one, or --stop-after
  bool due(int64_t step) const;
  void save(int64_t step);

 private:
  const Options& options_;
  AdamW& optimizer_;
  CheckpointSettings settings_;
  int64_t steps_;
  Communicator* world_;
};

// What a resumed run must have in common with the one that was saved.
CheckpointSettings run_settings(const Options& options, const Corpus& corpus,
                                const UpdateRule& rule);

// --export: a Hugging Face directory with the weights in the type they are computed with. Of
// several ranks all take part, because each may own a part of the weights, and the first writes.
void export_weights(const std::vector<Owned>& owned, const Options& options,
                    Communicator* world = nullptr);

}  // namespace lockstep
