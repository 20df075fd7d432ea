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

Report::Report(const Options& o, int64_t steps, Cut ranks)
    : steps_(steps),
      speaks_(ranks.rank == 0),
      terminal_(isatty(STDOUT_FILENO)),
      log_path_(o.log),
      efficiency_(o.config, o.sequence, o.recompute, o.compute, device::name(o.device),
                  ranks.size) {
  if (speaks_ && !log_path_.empty()) {
    log_.open(log_path_, o.resume ? std::ios::app : std::ios::trunc);
    require(log_.is_open(), "--log ", log_path_, " cannot be written");
  }
  begin_ = last_line_ = Clock::now();
}

// A run that ends with an error leaves its sentence on a line of its own.
Report::~Report() { clear_bar(); }

void Report::write_log(const std::string& line) {
  log_ << line << std::endl;
  require(log_.good(), "--log ", log_path_, " could not be written: is the disk full?");
}

double Report::tokens_per_second() const {
  return timed_seconds_ > 0 ? double(timed_tokens_) / timed_seconds_ : 0;
}

void Report::step(int64_t step, const Tensor& state, int64_t tokens) {
  StepState previous;
  Launched before = std::exchange(launched_, {step, tokens});
  if (late_.read(state, previous) && before.step > 0) known(before, previous);
}

void Report::known(const Launched& which, const StepState& s) {
  require(!s.stopped, "step ", which.step, ": the loss is ", s.loss, " and the gradient norm ",
          s.gradient_norm,
          "; training stops, and the weights are still those of the step before. A smaller ",
          "--learning-rate or a longer --warmup may help, or a look at data and first weights");
  if (undisturbed_) {
    timed_tokens_ += which.tokens;
    timed_seconds_ += seconds_since(last_known_);
  }
  undisturbed_ = true;
  last_known_ = Clock::now();
  if (!timing_) {  // the first step allocates and compiles: the clock starts behind it
    timing_ = true;
    before_ = which.step - 1;
    begin_ = Clock::now();
  }
  if (log_.is_open()) {
    auto known = [](std::optional<double> x) { return x ? nlohmann::json(*x) : nullptr; };
    Utilisation use = efficiency_.at(tokens_per_second());
    nlohmann::json line = {{"step", which.step},
                           {"loss", s.loss},
                           {"gradient_norm", s.gradient_norm},
                           {"learning_rate", s.learning_rate},
                           {"tokens", which.tokens},
                           {"valid_tokens", s.valid_tokens},
                           {"skipped", s.skip != 0},
                           {"tokens_per_second", tokens_per_second()},
                           {"mfu", known(use.mfu)},
                           {"hfu", known(use.hfu)},
                           {"memory_bytes", memory_account()->now()},
                           {"memory_peak_bytes", memory_account()->peak()}};
    write_log(line.dump());
  }
  draw(which, s);
}

// "1234 tokens/s  12s left", or nothing before anything could be timed.
std::string Report::pace(const Launched& which) const {
  if (timed_seconds_ == 0) return "";
  double per_step = seconds_since(begin_) / double(std::max<int64_t>(1, which.step - before_ - 1));
  return text(std::llround(tokens_per_second()), " tokens/s  ",
              duration(double(steps_ - which.step) * per_step), " left");
}

std::string Report::line(const Launched& which, const StepState& s) const {
  char out[160];
  std::snprintf(out, sizeof out, "step %lld/%lld  loss %.3f  norm %.2f  lr %.2e  ",
                static_cast<long long>(which.step), static_cast<long long>(steps_), s.loss,
                s.gradient_norm, double(s.learning_rate));
  return out + pace(which);
}

void Report::draw(const Launched& which, const StepState& s) {
  if (!speaks_) return;
  last_drawn_ = line(which, s);
  if (terminal_) {
    if (seconds_since(last_line_) < 0.1 && which.step < steps_) return;
    constexpr int kWidth = 24;
    int filled = int(kWidth * which.step / std::max<int64_t>(1, steps_));
    std::printf("\r[%.*s%.*s] %lld/%lld  loss %.3f  %s \033[K", filled, "########################",
                kWidth - filled, "........................", static_cast<long long>(which.step),
                static_cast<long long>(steps_), s.loss, pace(which).c_str());
    bar_shown_ = true;
  } else {
    int64_t every = std::max<int64_t>(1, steps_ / 20);
    if (which.step % every != 0 && which.step != 1 && which.step != steps_) return;
    std::printf("%s\n", last_drawn_.c_str());
  }
  std::fflush(stdout);
  last_line_ = Clock::now();
}

void Report::clear_bar() {
  if (bar_shown_) std::printf("\r\033[K");
  if (bar_shown_) std::fflush(stdout);
  bar_shown_ = false;
}

void Report::validation(int64_t step, double loss) {
  settle();  // what happened first is told first
  if (!speaks_) return;
  clear_bar();
  std::printf("step %lld: validation loss %.3f\n", static_cast<long long>(step), loss);
  std::fflush(stdout);
  if (log_.is_open()) write_log(nlohmann::json{{"step", step}, {"validation_loss", loss}}.dump());
}

// Waits for the step that is still under way.
void Report::settle() {
  StepState last;
  undisturbed_ = false;  // on the CPU this step was timed with the one before
  if (launched_.step > 0 && late_.last(last)) known(std::exchange(launched_, {}), last);
  undisturbed_ = false;
}

void Report::finish() {
  settle();
  clear_bar();
}

void Report::summary() {
  if (!speaks_) return;
  if (terminal_ && !last_drawn_.empty()) std::printf("%s\n", last_drawn_.c_str());
  std::string warning = efficiency_.warning();
  if (!warning.empty()) std::fprintf(stderr, "%s\n", warning.c_str());
  std::printf("%s\n", efficiency_.line(tokens_per_second()).c_str());
  std::fflush(stdout);
}

}  // namespace lockstep
