// What is left of a schedule's promise when threads, messages and clocks are real? The program runs
// the same executor as train.cpp (pipeline.h) on stages that do not compute but sleep for a given
// time, and puts the measured idle share beside the closed form and the simulation.
//
//     ./lockstep run 06 calibrated                                     every schedule on 4 ranks
//     ./lockstep run 06 calibrated --ranks 8 --micro-batches 16
//     ./lockstep run 06 calibrated --schedule zb-h1 --svg zb.svg       one of them, with a picture
//
// One core is enough: sleeping ranks do not need any.
//
//     deadline   |── F0 ──|── F1 ──|      |── B0 ─── …      An action ends at an absolute moment:
//     woken up            ' a bit late  ' …                 that of the one before and its own
//                                                           time. So a thread that the system wakes
//     up late does not delay all that follow. After a wait for a message it counts from then on.
//
// You should see: measured idle within a point of the closed form, for schedules that have one.

#include <CLI/CLI.hpp>
#include <thread>

#include "06_pipeline_parallel/closed_forms.h"
#include "06_pipeline_parallel/schedules.h"
#include "06_pipeline_parallel/split_layers.h"
#include "06_pipeline_parallel/stopwatch.h"
#include "common/command_line.h"
#include "common/ranks.h"

using namespace lockstep;

struct Settings {
  std::string schedule = "all", svg;
  int ranks = 4, chunks = 0, micro_batches = 0;
  StepTimes ms{20, 20, 20};  // of a rank's layers and one micro-batch
};

// Sleeps end to end.
class Sleeper {
 public:
  void sleep(double ms) {
    auto now = Clock::now();
    if (now > deadline_ + kPatience) deadline_ = now;  // it has waited for something
    deadline_ += std::chrono::duration_cast<Clock::duration>(
        std::chrono::duration<double, std::milli>(ms));
    std::this_thread::sleep_until(deadline_);
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr auto kPatience = std::chrono::milliseconds(1);
  Clock::time_point deadline_;
};

// Parts (parts.h) of a model whose blocks sleep for F, I and W; embedding and head take no time.
static Parts sleeping_parts(const ModelConfig& config, StepTimes ms, Sleeper& sleeper) {
  Parts parts = plain_parts();
  parts.around = [=, &sleeper](Tape& tape, const Var& x, Unit& unit, const Body&) {
    Tensor out =
        Tensor::zeros(unit.kind == Unit::Head ? Shape{1} : Shape{1, config.hidden}, DType::F32,
                      Device::CPU);
    if (unit.kind != Unit::Block) return tape.record("end", {out}, {x}, [x](const Gradients& d) {
      return Gradients{x.value};
    })[0];
    sleeper.sleep(ms.forward);
    auto input = [=, &sleeper](const Gradients& d) {
      sleeper.sleep(ms.input);
      return d;
    };
    auto weight = [=, &sleeper](const Gradients&) { sleeper.sleep(ms.weight); };
    return tape.record("sleep", {out}, {x}, input, {unit.groups[0][0]}, weight)[0];
  };
  return parts;
}
