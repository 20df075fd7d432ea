#pragma once
// What a run tells its user: a progress bar on a terminal, plain lines elsewhere, one JSON line per
// step in a file. It learns each step's numbers one step late, so that nobody waits for the device,
// and it ends the run when a loss or a gradient was not finite. Of several ranks the first speaks
// and writes; all learn the numbers, which are the same everywhere, so that all end in the same
// step.

#include <chrono>
#include <fstream>
#include <string>

#include "common/flops.h"
#include "common/optim.h"
#include "common/options.h"

namespace lockstep {

class Report {
 public:
  Report(const Options& options, int64_t steps, Cut ranks = {});
  ~Report();

  // After each step was launched: step counts from 1, tokens are those of the global batch.
  void step(int64_t step, const Tensor& state, int64_t tokens);
  void validation(int64_t step, double loss);
  // Waits for the last step that was launched and closes the bar. More steps may follow.
  void finish();
  // The last lines: tokens/s, and how much of the device that is (flops.h).
  void summary();
  // Of training alone: the first step, evaluations and checkpoints are left out. 0 until known.
  double tokens_per_second() const;

 private:
  struct Launched {
    int64_t step = 0, tokens = 0;
  };
  void known(const Launched& which, const StepState& state);
  void settle();
  std::string pace(const Launched& which) const;
  std::string line(const Launched& which, const StepState& state) const;
  void draw(const Launched& which, const StepState& state);
  void clear_bar();
  void write_log(const std::string& line);

  int64_t steps_, before_ = 0;  // of the run; done before this program, when it resumed one
  bool speaks_, terminal_;
  std::ofstream log_;
  std::string log_path_, last_drawn_;
  Efficiency efficiency_;
  LateState late_;
  Launched launched_;
  std::chrono::steady_clock::time_point begin_, last_line_, last_known_;
  int64_t timed_tokens_ = 0;  // in timed_seconds_
  double timed_seconds_ = 0;
  bool undisturbed_ = false;  // nothing but training since last_known_
  bool timing_ = false, bar_shown_ = false;
};

// "1h 02m", "3m 05s", "12s"
std::string duration(double seconds);

}  // namespace lockstep
