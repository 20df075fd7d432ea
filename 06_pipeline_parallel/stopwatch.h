#pragma once
// When a rank did what: the measured side of simulate.h. A step is watched from a barrier on, so
// that all ranks' clocks begin together. An action begins when what it needs has arrived; what is
// between two actions is idle. On a GPU the times are those at which its stream passed.

#include <chrono>
#include <cstdio>
#include <fstream>

#include "06_pipeline_parallel/draw_timeline.h"
#include "06_pipeline_parallel/pipeline.h"
#include "common/device.h"
#include "common/mesh.h"

namespace lockstep {

class Stopwatch {
 public:
  void start(Communicator& pp, Device device) {
    device_ = device;
    actions_.clear();
    pp.barrier();
    now(start_);
  }
  Pipeline::Observer observer() {
    return [this](const Action& action, bool begins) {
      if (begins) actions_.push_back({action, {}, {}});
      now(begins ? actions_.back().begin : actions_.back().end);
    };
  }
  bool any() const { return !actions_.empty(); }
  // Seconds since the start.
  std::vector<ActionSpan> spans() const {
    std::vector<ActionSpan> out;
    for (const Watched& w : actions_) out.push_back({w.action, since(w.begin), since(w.end)});
    return out;
  }

 private:
  using Clock = std::chrono::steady_clock;
  struct Moment {
    Clock::time_point host;
    std::unique_ptr<device::TimedEvent> event;  // on a GPU
  };
  struct Watched {
    Action action;
    Moment begin, end;
  };
  void now(Moment& moment) {
    moment.host = Clock::now();
    if (device_ != Device::CUDA) return;
    moment.event = std::make_unique<device::TimedEvent>();
    moment.event->record();
  }
  double since(const Moment& moment) const {
    if (moment.event) return moment.event->seconds_since(*start_.event);
    return std::chrono::duration<double>(moment.host - start_.host).count();
  }

  Device device_ = Device::CPU;
  Moment start_;
  std::vector<Watched> actions_;
};

// Everyone's spans on every rank: of the first of the pipelines that run side by side.
inline Timeline gather_timeline(ProcessMesh& mesh, const std::vector<ActionSpan>& mine) {
  std::string words;
  char line[120];
  for (const ActionSpan& s : mine) {
    std::snprintf(line, sizeof line, "%d %d %d %.9f %.9f ", int(s.action.kind), s.action.chunk,
                  s.action.micro, s.begin, s.end);
    words += line;
  }
  Timeline timeline;
  for (const std::string& theirs : mesh.pp().gather_texts(words)) {
    std::istringstream in(theirs);
    timeline.emplace_back();
    int kind, chunk, micro;
    for (double begin, end; in >> kind >> chunk >> micro >> begin >> end;)
      timeline.back().push_back({{Action::Kind(kind), chunk, micro}, begin, end});
  }
  return timeline;
}

// What each stage's actions took, on average. B is I and W: where W was seen alone its time is
// taken off B, and elsewhere all of B counts as I.
inline Times mean_times(const Timeline& timeline, const Placement& placement) {
  Times times = equal_times(placement.stages(), 0, 0, 0);
  std::vector<std::array<int, 4>> counts(size_t(placement.stages()));
  for (size_t rank = 0; rank < timeline.size(); ++rank)
    for (const ActionSpan& s : timeline[rank]) {
      size_t stage = size_t(placement.stage(int(rank), s.action.chunk));
      double length = s.end - s.begin;
      (s.action.kind == Action::F   ? times.forward
       : s.action.kind == Action::W ? times.weight
                                    : times.input)[stage] += length;
      ++counts[stage][size_t(s.action.kind)];
    }
  for (size_t s = 0; s < counts.size(); ++s) {
    times.forward[s] /= std::max(1, counts[s][Action::F]);
    times.weight[s] /= std::max(1, counts[s][Action::W]);
    times.input[s] -= counts[s][Action::B] * times.weight[s];
    times.input[s] /= std::max(1, counts[s][Action::B] + counts[s][Action::I]);
  }
  return times;
}

// Idle shares of the watched step beside those of the simulation with its own times.
inline void show_idle(const Pipeline::Settings& pipeline, int micro_batches,
                      const Timeline& measured, const std::string& svg) {
  Times times = mean_times(measured, pipeline.placement);
  Timeline planned = simulate(pipeline.schedule(micro_batches), pipeline.placement, times);
  Idle plan = idle(planned), real = idle(measured);
  for (size_t rank = 0; rank < measured.size(); ++rank)
    std::printf("idle    rank %zu: %s of its span, %s of the clock; simulated %s and %s\n", rank,
                percent(real.on_span[rank]).c_str(), percent(real.on_clock[rank]).c_str(),
                percent(plan.on_span[rank]).c_str(), percent(plan.on_clock[rank]).c_str());
  std::printf(
      "idle    all: %s of the clock, %s of the ideal; simulated %s and %s; step %.1f ms, "
      "simulated %.1f\n",
      percent(real.of_clock).c_str(), percent(real.of_ideal).c_str(),
      percent(plan.of_clock).c_str(), percent(plan.of_ideal).c_str(), 1e3 * real.step,
      1e3 * plan.step);
  for (size_t s = 0; s < times.forward.size(); ++s)
    std::printf("times   stage %zu: F %.2f ms, I %.2f, W %.2f%s\n", s, 1e3 * times.forward[s],
                1e3 * times.input[s], 1e3 * times.weight[s],
                times.weight[s] == 0 ? " (I: all of backward)" : "");
  if (svg.empty()) return;
  std::ofstream file(svg);
  file << as_svg("a step", "s", {{"planned", planned}, {"measured", measured}});
  require(file.good(), "--svg ", svg, " cannot be written");
}

}  // namespace lockstep
