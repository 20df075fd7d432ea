// What is left of a schedule's promise when threads, messages and clocks are real? Stages that do
// not compute but sleep for a given time, in the executor of train.cpp (pipeline.h); measured idle
// shares beside the closed form and the simulation.
//
//     ./lockstep run 06 calibrated                                every schedule, 4 ranks
//     ./lockstep run 06 calibrated --ranks 16 --micro-batches 32
//     ./lockstep run 06 calibrated --schedule zb-h1 --svg zb.svg  one of them, with its timeline
//
// Sleeping ranks need no processor, so sixteen of them fit on two cores. An action ends at an
// absolute moment, the end of the one before and its own time:
//
//     deadlines      |─── F0 ───|─── F1 ───|         |─── B0 ───|
//     woken up                   ' a bit    ' late     counts from when its message was there
//
// so that a thread which the system wakes up late does not delay all that follows.
//
// You should see: idle shares within about a point of their closed forms.

#include <CLI/CLI.hpp>
#include <thread>

#include "06_pipeline_parallel/closed_forms.h"
#include "06_pipeline_parallel/schedules.h"
#include "06_pipeline_parallel/split_layers.h"
#include "06_pipeline_parallel/stopwatch.h"
#include "common/evaluate.h"
#include "common/launch_flags.h"

using namespace lockstep;

struct Settings {
  std::string schedule = "all", svg;
  int64_t micro_batches = 0, steps = 3;
  double forward = 20, input = 20, weight = 20;  // ms, of a rank's layers
  bool dry_run = false;
};

class Sleeper {
 public:
  void sleep(double ms) {
    Clock::time_point now = Clock::now();
    if (now > deadline_ + kLate) deadline_ = now;  // it has waited for a message
    deadline_ += std::chrono::round<Clock::duration>(std::chrono::duration<double, std::milli>(ms));
    std::this_thread::sleep_until(deadline_);
  }

 private:
  using Clock = std::chrono::steady_clock;
  static constexpr std::chrono::milliseconds kLate{1};
  Clock::time_point deadline_;
};

// A model (parts.h) whose blocks sleep. Embedding and head take no time.
static Parts sleeping_parts(const ModelConfig& config, Device device, StepTimes ms,
                            Sleeper& sleeper) {
  Parts parts = plain_parts();
  parts.around = [=, &sleeper](Tape& tape, const Var& x, Unit& unit, const Body&) {
    Tensor row = Tensor::zeros({1, config.hidden}, DType::F32, device);
    if (unit.kind == Unit::Embedding) return Var{row};
    if (unit.kind == Unit::Head) {
      Tensor loss = Tensor::zeros({1}, DType::F32, device);
      return tape.record("head", {loss}, {x},
                         [row](const Gradients&) { return Gradients{row}; })[0];
    }
    sleeper.sleep(ms.forward);
    auto input = [=, &sleeper](const Gradients& d) { return sleeper.sleep(ms.input), d; };
    auto weight = [=, &sleeper](const Gradients&) { sleeper.sleep(ms.weight); };
    return tape.record("block", {row}, {x}, input, {unit.groups[0][0]}, weight)[0];
  };
  return parts;
}

// The step of median length, after one that is not watched.
static Timeline run(const Settings& s, const std::string& schedule, ProcessMesh& mesh) {
  int m = int(s.micro_batches), ranks = mesh.pp().size();
  Placement placement = make_schedule(schedule, ranks, 0, m).placement;
  Options options;
  options.device = Device::CPU, options.compute = DType::F32;
  options.config.layers = placement.stages();  // one each
  double v = placement.chunks;
  Sleeper sleeper;
  Parts parts = sleeping_parts(options.config, options.device,
                               {s.forward / v, s.input / v, s.weight / v}, sleeper);
  std::vector<std::unique_ptr<Stage>> stages = make_stages(
      options, parts, placement, mesh.pp().rank(), split_layers(options.config.layers, placement));
  std::vector<Stage*> chunks;
  for (auto& stage : stages) chunks.push_back(stage.get());
  Pipeline pipeline(chunks, mesh.pp(), {placement, [&](int n) {
                                          return make_schedule(schedule, ranks, 0, n).schedule;
                                        }});
  std::vector<MicroBatch> batches(size_t(m), sequence({0}, options.device));
  Tensor one = Tensor::zeros({1}, DType::F32, options.device, Category::Buffers);
  std::vector<Timeline> steps;
  for (int64_t step = 0; step <= s.steps; ++step) {
    Stopwatch watch;
    watch.start(mesh.pp(), options.device);
    pipeline.run(
        batches, one, one, [](const Tensor&) {}, watch.observer());
    Timeline timeline = gather_timeline(mesh, watch.spans());
    if (step > 0) steps.push_back(timeline);
  }
  std::sort(steps.begin(), steps.end(),
            [](const Timeline& a, const Timeline& b) { return idle(a).step < idle(b).step; });
  return steps[steps.size() / 2];
}

static double mean(const std::vector<double>& values) {
  return std::accumulate(values.begin(), values.end(), 0.0) / double(values.size());
}

// Shares of the clock, and of the ranks' own spans on average; nothing where there is no formula.
struct Shares {
  std::optional<double> clock, span;
};
static Shares closed_form(const Settings& s, const std::string& schedule, int ranks, int chunks) {
  StepTimes t{s.forward, s.input, s.weight};
  double busy = double(s.micro_batches) * t.all();
  int m = int(s.micro_batches);
  Shares out;
  if (auto time = idle_on_clock(schedule, ranks, chunks, m, t)) out.clock = *time / (busy + *time);
  std::vector<double> spans;
  for (int r = 0; r < ranks; ++r)
    if (auto time = idle_on_span(schedule, ranks, m, r, t)) spans.push_back(*time / (busy + *time));
  if (!spans.empty()) out.span = mean(spans);
  return out;
}

static std::string cell(std::optional<double> share) { return share ? percent(*share) : "-"; }

static void show(const Settings& s, const std::string& schedule, const Timeline& measured,
                 bool whole_picture) {
  PlacedSchedule pipeline = make_schedule(schedule, int(measured.size()), 0, int(s.micro_batches));
  double v = 1000. * pipeline.placement.chunks;  // the stopwatch has seconds
  Timeline planned =
      simulate(pipeline.schedule, pipeline.placement,
               equal_times(pipeline.placement.stages(), s.forward / v, s.input / v, s.weight / v));
  Idle plan = idle(planned), real = idle(measured);
  Shares formula = closed_form(s, schedule, int(measured.size()), pipeline.placement.chunks);
  std::printf("%-12s %9s %9s %9s   %9s %9s %9s   %7.0f %7.0f\n", schedule.c_str(),
              cell(formula.clock).c_str(), percent(plan.of_clock).c_str(),
              percent(real.of_clock).c_str(), cell(formula.span).c_str(),
              percent(mean(plan.on_span)).c_str(), percent(mean(real.on_span)).c_str(),
              1000 * plan.step, 1000 * real.step);
  std::fflush(stdout);
  if (!whole_picture) return;
  std::printf("simulated\n%smeasured\n%s", as_text(planned).c_str(), as_text(measured).c_str());
  if (s.svg.empty()) return;
  svg::save(s.svg, as_svg(text(schedule, ": ranks that sleep"), "s",
                          {{"simulated", planned}, {"measured", measured}}));
}

static void compare(Settings s, Communicator& world) {
  ProcessMesh mesh(world, {.pp = world.size()});
  if (s.micro_batches == 0) s.micro_batches = 2 * world.size();  // which all schedules can take
  bool all = s.schedule == "all", speaks = world.rank() == 0;
  require(all ? s.svg.empty() : true, "--svg draws one --schedule, not all of them");
  auto names = all ? schedule_names() : std::vector{s.schedule};
  for (const std::string& name : names)  // refused before any has run
    make_schedule(name, world.size(), 0, int(s.micro_batches));
  if (speaks)
    std::printf(
        "%d ranks, %lld micro-batches; F, I, W: %g, %g, %g ms\n"
        "%-12s %29s   %29s   %15s\n%-12s %9s %9s %9s   %9s %9s %9s   %7s %7s\n",
        world.size(), static_cast<long long>(s.micro_batches), s.forward, s.input, s.weight, "",
        "idle on the clock", "on a rank's span", "step, ms", "schedule", "formula", "simulated",
        "measured", "formula", "simulated", "measured", "simul.", "meas.");
  for (const std::string& schedule : names) {
    Timeline measured = run(s, schedule, mesh);
    if (speaks) show(s, schedule, measured, !all);
  }
}

int main(int argc, char** argv) {
  return run_main(argc, argv, [](int argc, char** argv) {
    Settings s;
    Launch launch;
    launch.ranks = 4;
    CLI::App app("Measures how long schedules idle when stages take exactly as long as you say.");
    std::vector<std::string> names = schedule_names();
    names.push_back("all");
    word(app.add_option("--schedule", s.schedule, "its name, or all")->capture_default_str(),
         names);
    whole(app.add_option("--micro-batches", s.micro_batches, "in a step; 0: two for each rank"), 0,
          4096);
    whole(app.add_option("--steps", s.steps, "the one of median length counts")
              ->capture_default_str(),
          1, 100);
    auto time = [&](const char* name, double& value, const char* what) {
      real(app.add_option(name, value, what)->capture_default_str(), 0.1, 10'000);
    };
    time("--forward", s.forward, "ms that F of a rank's layers takes");
    time("--input", s.input, "I: gradients of inputs");
    time("--weight", s.weight, "W: gradients of weights");
    output_file(app.add_option("--svg", s.svg, "draw the timeline of one schedule into this file"));
    app.add_flag("--dry-run", s.dry_run, "check the flags and stop");
    add_launch_flags(app, launch);
    if (!parse_flags(app, argc, argv) || s.dry_run) return 0;
    return run_ranks(launch, [&](Communicator& world) { compare(s, world); });
  });
}
