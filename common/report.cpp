#include "common/report.h"

#include <unistd.h>

#include <cmath>
#include <cstdio>
#include <nlohmann/json.hpp>
#include <utility>

namespace lockstep {

using Clock = std::chrono::steady_clock;

static double seconds_since(Clock::time_point then) {
  return std::chrono::duration<double>(Clock::now() - then).count();
}

std::string duration(double seconds) {
  char out[32];
  int64_t s = std::llround(std::max(0.0, seconds));
  if (s >= 3600) {
    std::snprintf(out, sizeof out, "%dh %02dm", int(s / 3600), int(s / 60 % 60));
  } else if (s >= 60) {
    std::snprintf(out, sizeof out, "%dm %02ds", int(s / 60), int(s % 60));
  } else {
    std::snprintf(out, sizeof out, "%ds", int(s));
  }
  return out;
}

Report::Report(const Options& o, int64_t steps)
    : steps_(steps), terminal_(isatty(STDOUT_FILENO)), log_path_(o.log) {
  if (!log_path_.empty()) {
    log_.open(log_path_);
    require(log_.is_open(), "--log ", log_path_, " cannot be written");
  }
  begin_ = last_line_ = Clock::now();
}

double Report::tokens_per_second() const {
  double seconds = seconds_since(begin_);
  return timed_tokens_ > 0 && seconds > 0 ? double(timed_tokens_) / seconds : 0;
}

void Report::step(int64_t step, const Tensor& state, int64_t tokens) {
  StepState previous;
  Launched before = std::exchange(launched_, {step, tokens});
  if (late_.read(state, previous)) known(before, previous);
}

void Report::known(const Launched& which, const StepState& s) {
  require(!s.stopped, "step ", which.step, ": the loss is ", s.loss, " and the gradient norm ",
          s.gradient_norm, "; training stops, the weights are those of the step before. Try a ",
          "smaller --learning-rate or a longer --warmup");
  if (timing_) {
    timed_tokens_ += which.tokens;
  } else {  // the first step allocates and compiles: the clock starts behind it
    timing_ = true;
    begin_ = Clock::now();
  }
  if (log_.is_open()) {
    nlohmann::json line = {{"step", which.step},
                           {"loss", s.loss},
                           {"gradient_norm", s.gradient_norm},
                           {"learning_rate", s.learning_rate},
                           {"tokens", which.tokens},
                           {"valid_tokens", s.valid_tokens},
                           {"skipped", s.skip != 0},
                           {"tokens_per_second", tokens_per_second()},
                           {"memory_bytes", memory_account()->now()},
                           {"memory_peak_bytes", memory_account()->peak()}};
    log_ << line.dump() << std::endl;
    require(log_.good(), "--log ", log_path_, " could not be written: is the disk full?");
  }
  draw(which, s);
}

void Report::draw(const Launched& which, const StepState& s) {
  double left = double(steps_ - which.step) * seconds_since(begin_) / double(which.step);
  if (terminal_) {
    if (seconds_since(last_line_) < 0.1 && which.step < steps_) return;
    constexpr int kWidth = 24;
    int filled = int(kWidth * which.step / std::max<int64_t>(1, steps_));
    std::printf("\r[%.*s%.*s] %lld/%lld  loss %.3f  %.0f tokens/s  %s left \033[K", filled,
                "########################", kWidth - filled, "........................",
                static_cast<long long>(which.step), static_cast<long long>(steps_), s.loss,
                tokens_per_second(), duration(left).c_str());
    bar_shown_ = true;
  } else {
    int64_t every = std::max<int64_t>(1, steps_ / 20);
    if (which.step % every != 0 && which.step != 1 && which.step != steps_) return;
    std::printf("step %lld/%lld  loss %.3f  norm %.2f  lr %.2e  %.0f tokens/s  %s left\n",
                static_cast<long long>(which.step), static_cast<long long>(steps_), s.loss,
                s.gradient_norm, double(s.learning_rate), tokens_per_second(),
                duration(left).c_str());
  }
  std::fflush(stdout);
  last_line_ = Clock::now();
}

void Report::clear_bar() {
  if (bar_shown_) std::printf("\r\033[K");
  bar_shown_ = false;
}

void Report::validation(int64_t step, double loss) {
  clear_bar();
  std::printf("step %lld: validation loss %.3f\n", static_cast<long long>(step), loss);
  std::fflush(stdout);
  if (log_.is_open())
    log_ << nlohmann::json{{"step", step}, {"validation_loss", loss}}.dump() << std::endl;
}

void Report::finish() {
  StepState last;
  if (late_.last(last)) known(launched_, last);
  clear_bar();
}

}  // namespace lockstep
