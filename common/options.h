#pragma once
// The command line that all chapter programs share (CLI11), and the same settings from a JSON file
// (--config run.json; a flag on the command line wins). A wrong value ends the program with one
// sentence before any work.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "common/command_line.h"
#include "common/dtype.h"
#include "common/flops.h"
#include "common/memory.h"
#include "common/model_config.h"
#include "common/step_state.h"

namespace CLI {
class App;
}

namespace lockstep {

struct Options {
  // Model: a preset, then single numbers, or a Hugging Face directory.
  std::string model = "tiny";
  std::string hugging_face;
  ModelConfig config;  // what these came to

  // Data and batch. A global batch is counted in tokens: batch_tokens = micro_batch * sequence *
  // accumulation * dp; 0 asks for one micro-batch on each rank.
  std::string data;  // empty: the default corpus
  int64_t sequence = 128, micro_batch = 16, batch_tokens = 0;
  int64_t dp = 1;                   // ranks that share a global batch: settle_batch()
  int64_t steps = 600, epochs = 0;  // epochs > 0: as many steps as they take (Feed::steps)

  UpdateRule update;  // its schedule gets warm-up and length from update_rule() (plan.h)
  std::optional<int64_t> warmup;  // steps
  DType compute = DType::F32, gradients = DType::F32;
  Recompute recompute = Recompute::None;
  Device device = Device::CPU;
  bool ladder_matmul = false;  // --matmul: use_own_matmul() in 08_kernels/use_matmul.h
  std::string why_no_gpu;      // what keeps a CUDA build on the CPU, if anything
  uint64_t seed = 1;

  int64_t evaluate_every = 100, evaluation_batches = 16;
  int64_t sample = 200;      // tokens to generate at the end
  double temperature = 0.8;  // of the sample
  std::string log;           // one JSON line per step
  std::string trace;         // file for a Chrome trace of three steps, empty: none
  bool profile = false;      // say what those steps spent their time on

  std::string checkpoint;        // directory, empty: nothing is saved
  int64_t checkpoint_every = 0;  // steps, 0: only after the last one
  int64_t keep = 2;              // newest checkpoints that stay
  bool resume = false;
  int64_t stop_after = 0;  // step, 0: the run's last one
  std::string export_to;   // Hugging Face directory to write at the end

  bool dry_run = false;

  int64_t batch_sequences() const { return batch_tokens / sequence; }
  int64_t accumulation() const { return batch_sequences() / (micro_batch * dp); }
};

// For a program of one rank. Reads argv. `more` lets a chapter add its own flags to the parser.
// Prints --help itself, and returns nothing in that case.
std::optional<Options> parse_options(int argc, char** argv, const std::string& what_it_does,
                                     const std::function<void(CLI::App&)>& more = {});

// For programs that know the number of their ranks only when they run: without settle_batch().
std::optional<Options> parse_options_of_ranks(int argc, char** argv,
                                              const std::string& what_it_does,
                                              const std::function<void(CLI::App&)>& more = {});
// The batch of a job with so many data-parallel ranks: fills in what was left to the default, and
// refuses a batch that they cannot share.
void settle_batch(Options& options, int64_t dp);

// The model shapes that --model knows; throws for other names.
ModelConfig preset(const std::string& name);

// Micro-batches per step and rank, or a sentence with all numbers: the global batch must be a
// multiple of what all ranks take in one forward. Nothing is ever rounded.
int64_t accumulation_for(int64_t batch_tokens, int64_t micro_batch, int64_t sequence,
                         int64_t dp = 1);

}  // namespace lockstep
