#pragma once
// The command line that all chapter programs share (CLI11), and the same settings from a JSON file
// (--config run.json; a flag on the command line wins). A wrong value ends the program with one
// sentence before any work.

#include <cstdint>
#include <functional>
#include <optional>
#include <string>

#include "common/dtype.h"
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
  // accumulation (* dp); 0 asks for one micro-batch.
  std::string data;  // empty: the default corpus
  int64_t sequence = 128, micro_batch = 16, batch_tokens = 0;
  int64_t steps = 600, epochs = 0;  // epochs > 0 sets steps

  UpdateRule update;
  DType compute = DType::F32, gradients = DType::F32;
  Device device = Device::CPU;
  std::string why_no_gpu;  // what keeps a CUDA build on the CPU, if anything
  uint64_t seed = 1;

  int64_t evaluate_every = 100, evaluation_batches = 16;
  int64_t sample = 200;      // tokens to generate at the end
  double temperature = 0.8;  // of the sample
  std::string log;           // one JSON line per step
  bool dry_run = false;

  int64_t batch_sequences() const { return batch_tokens / sequence; }
  int64_t accumulation() const { return batch_sequences() / micro_batch; }
};

// Reads argv. `more` lets a chapter add its own flags to the parser. Prints --help itself, and
// returns nothing in that case.
std::optional<Options> parse_options(int argc, char** argv, const std::string& what_it_does,
                                     const std::function<void(CLI::App&)>& more = {});

std::string one_line(std::string sentence);  // without line breaks

// The model shapes that --model knows; throws for other names.
ModelConfig preset(const std::string& name);

// micro-batches per step, or a sentence with both numbers: the global batch must be a multiple of
// what one forward takes.
int64_t accumulation_for(int64_t batch_tokens, int64_t micro_batch, int64_t sequence);

// Runs a program: body's exceptions become one line on stderr and a non-zero exit status.
int run_main(int argc, char** argv, const std::function<int(int, char**)>& body);

}  // namespace lockstep
