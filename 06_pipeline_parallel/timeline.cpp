// A pipeline schedule, drawn: who computes what when, how long everyone waits, what it holds.
// Nothing is trained; the times are yours.
//
//     ./lockstep run 06 timeline                                     1F1B, 4 ranks, 8 micro-batches
//     ./lockstep run 06 timeline --schedule zb-v --svg zb.svg
//     ./lockstep run 06 timeline --forward 1,1,1,1.4 --search        the last stage has the head
//     ./lockstep run 06 timeline --schedule zb-h1 --measured m.csv   beside what train measured
//
// You should see: 1F1B idles as long as all-forward-all-backward, and holds p activations instead
// of m; the zero-bubble schedules idle less, ZB-H1 with no more memory. ZB-H2 leaves nothing idle
// between a rank's first and last action, but where all ranks stop after a step, "on the clock",
// it gains nothing over ZB-H1.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>

#include "06_pipeline_parallel/closed_forms.h"
#include "06_pipeline_parallel/draw_timeline.h"
#include "06_pipeline_parallel/search.h"
#include "common/command_line.h"

using namespace lockstep;

struct Settings {
  std::string schedule = "1f1b", csv, picture, measured;
  int ranks = 4, chunks = 0, micro_batches = 8, group = 0;
  std::vector<double> forward{1}, input{1}, weight{1};
  double message = 0, memory = 0;
  bool search = false, dry_run = false;
};

// One number is the time of a rank's layers, of which its chunks take equal parts.
static std::vector<double> of_stages(const char* flag, const std::vector<double>& given,
                                     const Placement& placement) {
  size_t stages = placement.stages();
  require(given.size() == 1 || given.size() == stages, flag, " takes one time, or one for each of ",
          stages, " stages, not ", given.size());
  for (double time : given)
    require(time > 0 && time < 1e9, flag, " takes times above 0 and below 1e9, not ", time);
  if (given.size() == stages) return given;
  return std::vector<double>(stages, given[0] / placement.chunks);
}

static Times times_for(const Settings& s, const Placement& placement) {
  return {of_stages("--forward", s.forward, placement), of_stages("--input", s.input, placement),
          of_stages("--weight", s.weight, placement), s.message};
}

static void describe_plan(const PlacedSchedule& pipeline, int micro_batches) {
  validate(pipeline.schedule, pipeline.placement, micro_batches);
  Plan rounds = plan(pipeline.schedule, pipeline.placement);
  size_t actions = 0, messages = 0;
  for (const auto& rank : rounds)
    for (const Round& round : rank) {
      actions += round.action ? 1 : 0;
      for (const Message& m : round.messages) messages += m.sends ? 1 : 0;
    }
  std::printf("valid            %zu actions and %zu messages in %zu rounds\n", actions, messages,
              rounds[0].size());
}

static std::string number(double x) {
  char out[32];
  std::snprintf(out, sizeof out, "%.4g", x);
  return out;
}
static std::string number(std::optional<double> x) { return x ? number(*x) : "-"; }

static void show_idle(const Timeline& timeline, const PlacedSchedule& pipeline) {
  Idle shares = idle(timeline);
  std::printf("%6s %10s %10s %13s %14s %18s\n", "rank", "busy", "idle", "on its span",
              "on the clock", "activations held");
  for (size_t rank = 0; rank < timeline.size(); ++rank)
    std::printf(
        "%6zu %10s %10s %13s %14s %18s\n", rank, number(shares.busy[rank]).c_str(),
        number(shares.step - shares.busy[rank]).c_str(), percent(shares.on_span[rank]).c_str(),
        percent(shares.on_clock[rank]).c_str(),
        number(peak_activations(pipeline.schedule[rank], pipeline.placement.chunks)).c_str());
  std::printf("step %s: idle %s of the clock, %s of what all ranks compute\n",
              number(shares.step).c_str(), percent(shares.of_clock).c_str(),
              percent(shares.of_ideal).c_str());
}

// Formulas know equal stages and free messages only.
static void show_closed_forms(const Settings& s, const Placement& placement) {
  if (s.forward.size() + s.input.size() + s.weight.size() > 3 || s.message > 0) return;
  StepTimes t{s.forward[0], s.input[0], s.weight[0]};
  int p = s.ranks, v = placement.chunks, m = s.micro_batches;
  std::printf("closed form      idle %s on the clock; %s on the span of rank 0\n",
              number(idle_on_clock(s.schedule, p, v, m, t)).c_str(),
              number(idle_on_span(s.schedule, p, m, 0, t)).c_str());
  std::printf(
      "with B whole     (p-1)/(vm) = %s of what is computed, (p-1)/(vm+p-1) = %s of the clock\n",
      percent(bubble_of_ideal(p, m, v)).c_str(), percent(bubble_of_clock(p, m, v)).c_str());
}

static PlacedSchedule search_from(const PlacedSchedule& start, const Times& times,
                                  const Settings& s) {
  double own = peak_activations(start.schedule, start.placement.chunks);
  double limit = s.memory > 0 ? s.memory : own;
  Found found = search(start.placement, s.micro_batches, times, limit);
  double before = idle(simulate(start.schedule, start.placement, times)).step;
  std::printf("search           %d candidates with at most %s activations: %s\n", found.tried,
              number(limit).c_str(), found.name.c_str());
  std::printf("                 step %s instead of %s: %.3fx as fast, holds %s instead of %s\n",
              number(found.step).c_str(), number(before).c_str(), before / found.step,
              number(found.peak).c_str(), number(own).c_str());
  return {found.schedule, start.placement};
}

static std::string content_of(const std::string& path) {
  std::ifstream file(path);
  require(file.good(), "--measured ", path, " cannot be read");
  return {std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
}

static void run(const Settings& s) {
  PlacedSchedule pipeline = make_schedule(s.schedule, s.ranks, s.chunks, s.micro_batches, s.group);
  Times times = times_for(s, pipeline.placement);
  std::printf("schedule         %s: %d ranks with %d stage%s each, %d micro-batches\n",
              s.schedule.c_str(), s.ranks, pipeline.placement.chunks,
              pipeline.placement.chunks == 1 ? "" : "s", s.micro_batches);
  if (s.search) pipeline = search_from(pipeline, times, s);
  describe_plan(pipeline, s.micro_batches);
  Timeline planned = simulate(pipeline.schedule, pipeline.placement, times);
  std::vector<NamedTimeline> timelines{{s.measured.empty() ? "" : "planned", planned}};
  if (!s.measured.empty()) {
    timelines.push_back({"measured", from_csv(content_of(s.measured))});
    require(timelines[1].timeline.size() == planned.size(), "--measured ", s.measured, " has ",
            timelines[1].timeline.size(), " ranks, and the schedule ", planned.size());
  }
  std::printf(
      "F forward, I gradients of inputs, W of weights, B both; small letters: chunk 1, 3, …\n");
  for (const auto& [name, timeline] : timelines) {
    if (!name.empty()) std::printf("%s\n", name.c_str());
    std::printf("%s\n", as_text(timeline).c_str());
    show_idle(timeline, pipeline);
  }
  if (!s.search) show_closed_forms(s, pipeline.placement);
  if (!s.csv.empty()) {
    std::ofstream file(s.csv);
    file << as_csv(planned);
    file.close();
    require(file.good(), "--csv ", s.csv, " cannot be written");
  }
  if (!s.picture.empty())
    svg::save(s.picture, as_svg(text(s.search ? "searched from " : "", s.schedule, " on ", s.ranks,
                                     " ranks, ", s.micro_batches, " micro-batches"),
                                "time", timelines));
}

static void add_flags(CLI::App& app, Settings& s) {
  auto option = [&](const char* name, auto& value, const char* what) {
    return app.add_option(name, value, what)->capture_default_str();
  };
  word(option("--schedule", s.schedule, "its name"), schedule_names());
  whole(option("--pp", s.ranks, "ranks of the pipeline"), 1, 256);
  whole(option("--chunks", s.chunks, "stages on each rank; 0: the schedule's own"), 0, 64);
  whole(option("--micro-batches", s.micro_batches, "in a step"), 1, 4096);
  whole(option("--group", s.group,
               "interleaved: micro-batches that visit a chunk in a row, from --pp (depth first) to "
               "--micro-batches (breadth first)"),
        0, 4096);
  auto times = [&](const char* name, std::vector<double>& value, const char* what) {
    option(name, value, what)->delimiter(',');
  };
  times("--forward", s.forward, "F of a rank's layers, or of each stage: 1,1,1,1.4");
  times("--input", s.input, "I: gradients of inputs");
  times("--weight", s.weight, "W: gradients of weights; B = I + W");
  real(option("--message", s.message, "time of a message"), 0, 1e9);
  app.add_flag("--search", s.search, "look for the best order with these times");
  real(option("--memory", s.memory,
              "for --search: activations of stages that a rank can hold; 0: as the schedule"),
       0, 1e6);
  app.add_option("--measured", s.measured, "a timeline (CSV) to show beside the simulated one");
  output_file(app.add_option("--csv", s.csv, "write the timeline to this file"));
  output_file(app.add_option("--svg", s.picture, "draw it"));
  app.add_flag("--dry-run", s.dry_run, "check the flags and stop");
}

int main(int argc, char** argv) {
  return run_main(argc, argv, [](int argc, char** argv) {
    Settings s;
    CLI::App app("Draws a pipeline schedule and says how long it idles.");
    add_flags(app, s);
    if (!parse_flags(app, argc, argv) || s.dry_run) return 0;
    run(s);
    return 0;
  });
}
