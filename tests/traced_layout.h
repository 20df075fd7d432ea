#pragma once
// A training step in any layout with its parts named for a trace, and looks at such a trace:
// what was under way when.

#include "common/diagnose.h"
#include "common/intervals.h"
#include "common/trace.h"
#include "tests/layout.h"

namespace lockstep {

// A rank's part of a job, like LayoutRig, whose strategy the test may make itself. All ranks have
// as many targets, so that nothing need be sent to count them. Every unit is a part of the trace,
// too: "unit 0", "unit 1", … with "backward of unit 0" where its gradient begins.
struct TracedRig {
  using Make = std::function<std::unique_ptr<DataParallel>(std::vector<Stage*>, ProcessMesh&,
                                                           DataParallel::Settings)>;
  // pass, unit: about to compute.
  using Watch = std::function<void(DataParallel::Pass, int)>;
  TracedRig(ProcessMesh& process_mesh, const LayoutRig::Settings& s, Make make, Watch watch = {})
      : mesh(process_mesh), device(s.device) {
    Parts parts = plain_parts();
    parts.around = [this, watch](Tape& tape, const Var& x, Unit& unit, const Body& body) {
      const std::vector<Unit*>& units = model->units();
      int n = int(std::find(units.begin(), units.end(), &unit) - units.begin());
      if (watch) watch(DataParallel::Pass::Forward, n);
      std::string name = text("unit ", n);
      Span part(bound_trace(), name.c_str());
      Var out = body(tape, x);
      tape.mark("watch", [watch, n] {
        if (watch) watch(DataParallel::Pass::Backward, n);
        if (bound_trace()) bound_trace()->instant(text("backward of unit ", n));
      });
      return out;
    };
    use_zero(parts, parallel);
    model = std::make_unique<Stage>(s.config, parts, s.compute, s.device);
    parallel = make({model.get()}, mesh, s.parallel);
    parallel->allocate();
    initialise(parallel->owned(), s.seed);
    parallel->publish();
    optimizer = std::make_unique<AdamW>(parallel->owned(), s.rule, s.device, &mesh.world());
    one = Tensor::empty({1}, sum_type(s.compute), s.device, Category::Buffers);
    on(one).fill(one, 1);
  }

  void gradients(const std::vector<MicroBatch>& mine) {
    Span part(bound_trace(), "begin");
    int64_t count = 0;
    for (const MicroBatch& b : mine) count += b.targets.size() * mesh.data().size();
    Tensor valid = Tensor::from<int64_t>({count}, {1}, device, Category::Buffers);
    parallel->begin_step(int64_t(mine.size()));
    optimizer->begin_step(valid);
    for (const MicroBatch& b : mine) {
      Tape tape;
      part.next("forward");
      Var loss = model->loss(tape, model->forward(tape, b), b, optimizer->scale());
      optimizer->add_loss(loss.value);
      part.next("backward");
      tape.backward(loss, one);
    }
    part.next("finish");
    parallel->finish();
  }
  void step(const std::vector<MicroBatch>& mine, std::function<void(size_t)> updated = {}) {
    gradients(mine);
    Span part(bound_trace(), "optimizer");
    optimizer->step([&](size_t i) {
      parallel->updated(i);
      if (updated) updated(i);
    });
    part.next("publish");
    parallel->publish();
  }

  ProcessMesh& mesh;
  Device device;
  std::unique_ptr<DataParallel> parallel;
  std::unique_ptr<Stage> model;
  std::unique_ptr<AdamW> optimizer;
  Tensor one;
};

inline TracedRig::Make maker(Sync sync) {
  return [sync](std::vector<Stage*> chunks, ProcessMesh& mesh, DataParallel::Settings settings) {
    return make_parallel(sync, chunks, mesh, settings);
  };
}
inline TracedRig::Make zero1(Zero1::Gather gather) {
  return [gather](std::vector<Stage*> chunks, ProcessMesh& mesh, DataParallel::Settings settings) {
    return std::make_unique<Zero1>(chunks, mesh, settings, gather);
  };
}

// Events of one kind whose name begins like this, in the order of their begin.
inline std::vector<TraceEvent> find(const Recording& r, TraceEvent::Kind kind,
                                    const std::string& name) {
  std::vector<TraceEvent> found;
  for (const TraceEvent& e : r.events)
    if (e.kind == kind && e.name.rfind(name, 0) == 0) found.push_back(e);
  return found;
}
inline std::vector<Interval> times(const std::vector<TraceEvent>& events) {
  std::vector<Interval> out;
  for (const TraceEvent& e : events) out.push_back({e.begin, e.end});
  return out;
}
// How long both were under way, in nanoseconds.
inline int64_t together(const std::vector<TraceEvent>& a, const std::vector<TraceEvent>& b) {
  return common_length(times(a), times(b));
}

}  // namespace lockstep
