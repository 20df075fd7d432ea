#pragma once
// What a run tells its user: a progress bar on a terminal, plain lines elsewhere, one JSON line per
// step in a file. It learns each step's numbers one step late, so that nobody waits for the device,
// and it ends the run when a loss or a gradient was not finite.

#include <chrono>
#include <fstream>
#include <string>

#include "common/optim.h"
#include "common/options.h"

namespace lockstep {

class Report {
 public:
  Report(const Options& options, int64_t steps);

  // After each step was launched: step counts from 1, tokens are those of the global batch.
  void step(int64_t step, const Tensor& state, int64_t tokens);
  void validation(int64_t step, double loss);
  // Waits for the last step and closes the bar.
  void finish();
  double tokens_per_second() const;

 private:
  struct Launched {
    int64_t step = 0, tokens = 0;
  };
  void known(const Launched& which, const StepState& state);
  void draw(const Launched& which, const StepState& state);
  void clear_bar();

  int64_t steps_;
  bool terminal_;
  std::ofstream log_;
  std::string log_path_;
  LateState late_;
  Launched launched_;
  std::chrono::steady_clock::time_point begin_, last_line_;
  int64_t timed_tokens_ = 0;  // since the first step, which also warms up, has ended
  bool timing_ = false, bar_shown_ = false;
};

// "1h 02m", "3m 05s", "12s"
std::string duration(double seconds);

}  // namespace lockstep
