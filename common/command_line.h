#pragma once
// What the command line of any program needs, whatever its flags are: checks that answer with a
// sentence, settings from a JSON file, the choice of device and type, and main()'s frame.

#include <functional>
#include <string>

#include "common/dtype.h"
#include "common/memory.h"

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace lockstep {

// A wrong flag; printed without the line of code that found it.
struct UsageError : Error {
  explicit UsageError(const std::string& sentence, Here here = {}) : Error(sentence, here.where) {}
};

// Lets an option take whole numbers from low to high, or finite numbers from low to high ("more
// than low" where open), and say so if it gets something else.
CLI::Option* whole(CLI::Option* option, int64_t low, int64_t high);
CLI::Option* real(CLI::Option* option, double low, double high, bool open = false);
// One of these words.
CLI::Option* word(CLI::Option* option, const std::vector<std::string>& words);
// A file that will be written when all is done: tried now, so that no work is lost. What is in it
// stays until then.
CLI::Option* output_file(CLI::Option* option);

// --config FILE: a JSON object whose keys are the flags without their dashes. A flag on the command
// line wins.
void add_config_file(CLI::App& app);

// false: --help was asked for, and has been printed.
bool parse_flags(CLI::App& app, int argc, char** argv);

// "auto", "cpu" or "cuda" as what is there; asking for a GPU that is not there is an error. Why
// "auto" passed over one: why_no_gpu(), empty if it did not.
Device choose_device(const std::string& name);
std::string why_no_gpu(const std::string& name);

// "fp32", "bf16", or "" for what suits the device: bf16 on a GPU, fp32 on the CPU.
DType choose_type(const std::string& name, Device device);

// Runs a program: exceptions of body become one line on stderr and a non-zero exit status. So does
// output that could not be written.
int run_main(int argc, char** argv, const std::function<int(int, char**)>& body);

}  // namespace lockstep
