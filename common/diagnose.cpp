#include "common/diagnose.h"

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <map>

#include "common/check.h"

namespace lockstep {

namespace {

using Kind = TraceEvent::Kind;
using Lane = TraceEvent::Lane;

struct Interval {
  int64_t begin, end;
  int64_t length() const { return std::max<int64_t>(0, end - begin); }
};

Interval common_part(const Interval& a, const Interval& b) {
  return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
}

// Sorted, without overlap.
std::vector<Interval> united(std::vector<Interval> all) {
  std::sort(all.begin(), all.end(),
            [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  std::vector<Interval> out;
  for (const Interval& i : all) {
    if (!out.empty() && i.begin <= out.back().end) {
      out.back().end = std::max(out.back().end, i.end);
    } else {
      out.push_back(i);
    }
  }
  return out;
}

int64_t length_of(const std::vector<Interval>& intervals) {
  int64_t sum = 0;
  for (const Interval& i : intervals) sum += i.length();
  return sum;
}

using Events = std::vector<const TraceEvent*>;

// Of these kinds, the parts within `span`.
std::vector<Interval> times_of(const Events& events, Kind kind, const Interval& span) {
  std::vector<Interval> out;
  for (const TraceEvent* e : events) {
    Interval part = common_part({e->begin, e->end}, span);
    if (e->kind == kind && part.length() > 0) out.push_back(part);
  }
  return united(out);
}

// Streams where there are any: then a CPU thread's work is not what a step waits for.
Events kernels_of(const std::vector<TraceEvent>& events) {
  Events on_threads, on_streams;
  for (const TraceEvent& e : events) {
    if (e.kind != Kind::Kernel) continue;
    (e.lane.type == Lane::Stream ? on_streams : on_threads).push_back(&e);
  }
  return on_streams.empty() ? on_threads : on_streams;
}

// From the first kernel of the first step to the first kernel of the last one: whole steps, so that
// neither end of the recording counts as idle. A single step: from its first kernel to its last.
Interval span_of(const Events& kernels) {
  std::map<int64_t, int64_t> first;  // of each step
  int64_t last = kernels[0]->end;
  for (const TraceEvent* k : kernels) {
    auto [at, fresh] = first.try_emplace(k->step, k->begin);
    if (!fresh) at->second = std::min(at->second, k->begin);
    last = std::max(last, k->end);
  }
  return {first.begin()->second, first.size() > 1 ? first.rbegin()->second : last};
}

// The part of the program that took most of a gap; of those that took all of it, the innermost.
const TraceEvent* meanwhile(const Events& host, const Interval& gap) {
  const TraceEvent* found = nullptr;
  int64_t most = 0;
  for (const TraceEvent* e : host) {
    int64_t part = common_part({e->begin, e->end}, gap).length();
    bool inside = found && part == most && e->end - e->begin < found->end - found->begin;
    if (part > most || (part > 0 && inside)) {
      found = e;
      most = part;
    }
  }
  return found;
}

// A host that waits launches nothing. The wait ends when the device has run out of work, and what
// follows until the next launch arrives is its price.
const TraceEvent* wait_that_drained(const Events& waits, const Interval& gap) {
  for (const TraceEvent* w : waits)
    if (w->begin <= gap.begin && w->end > gap.begin) return w;
  return nullptr;
}

Gap explain(const Interval& gap, const Events& host) {
  Gap g;
  g.begin = gap.begin;
  g.length = gap.length();
  Events parts, waits;
  for (const TraceEvent* e : host) {
    if (e->kind == Kind::Data || e->kind == Kind::Host) parts.push_back(e);
    if (e->kind == Kind::Wait) waits.push_back(e);
  }
  if (const TraceEvent* part = meanwhile(parts, gap)) {
    g.meanwhile = part->name;
    g.step = part->step;
  }
  auto covered = [&](Kind kind) { return length_of(times_of(host, kind, gap)); };
  const TraceEvent* wait = wait_that_drained(waits, gap);
  if (2 * covered(Kind::Data) > g.length) {
    g.cause = Gap::Cause::Data;
  } else if (wait || 2 * covered(Kind::Wait) > g.length) {
    g.cause = Gap::Cause::HostWait;
    if (!wait) wait = meanwhile(waits, gap);
    g.meanwhile += (g.meanwhile.empty() ? "" : ", ") + wait->name;
  } else if (10 * covered(Kind::Launch) > g.length) {  // the rest is what it takes to get there
    g.cause = Gap::Cause::Launch;
  }
  return g;
}

// Host events that touch a gap. They are sorted by begin and the longest is known, so those that
// begin too early to reach the gap are left out.
Events near(const Events& host, int64_t longest, const Interval& gap) {
  auto before = [](const TraceEvent* e, int64_t at) { return e->begin < at; };
  auto from = std::lower_bound(host.begin(), host.end(), gap.begin - longest, before);
  auto to = std::lower_bound(from, host.end(), gap.end, before);
  return Events(from, to);
}

void find_gaps(Diagnosis& d, const std::vector<Interval>& busy, const Interval& span,
               const std::vector<TraceEvent>& events) {
  Events host;
  int64_t longest = 0;
  for (const TraceEvent& e : events) {
    if (e.kind == Kind::Kernel || e.kind == Kind::Step || e.kind == Kind::Instant) continue;
    host.push_back(&e);
    longest = std::max(longest, e.end - e.begin);
  }
  std::stable_sort(host.begin(), host.end(),
                   [](const TraceEvent* a, const TraceEvent* b) { return a->begin < b->begin; });
  int64_t at = span.begin;
  auto idle_until = [&](int64_t end) {
    Interval gap{at, end};
    if (gap.length() > 0) d.gaps.push_back(explain(gap, near(host, longest, gap)));
  };
  for (const Interval& i : busy) {
    idle_until(i.begin);
    at = i.end;
  }
  idle_until(span.end);
  for (const Gap& g : d.gaps) {
    d.idle += g.length;
    d.lost[size_t(g.cause)] += g.length;
  }
  std::stable_sort(d.gaps.begin(), d.gaps.end(),
                   [](const Gap& a, const Gap& b) { return a.length > b.length; });
  d.host_wait = length_of(times_of(host, Kind::Wait, span));
}

void find_overlap(Diagnosis& d, const Events& kernels, int64_t busy, const Interval& span) {
  std::map<std::pair<int, int>, Events> lanes;
  for (const TraceEvent* k : kernels) lanes[{k->lane.type, k->lane.number}].push_back(k);
  int64_t sum = 0, most = 0;
  for (const auto& [lane, events] : lanes) {
    int64_t time = length_of(times_of(events, Kind::Kernel, span));
    sum += time;
    most = std::max(most, time);
  }
  d.lanes = int(lanes.size());
  if (sum > most) d.overlap = double(sum - busy) / double(sum - most);
}

void add_up(Diagnosis& d, const Events& kernels, const std::vector<TraceEvent>& events) {
  std::map<std::string, KernelTime> by_name;
  for (const TraceEvent* k : kernels) {
    KernelTime& t = by_name[k->name];
    t.calls += 1;
    t.total += k->end - k->begin;
    d.kernels += 1;
    d.kernel_time += k->end - k->begin;
  }
  for (auto& [name, time] : by_name) {
    time.name = name;
    d.table.push_back(time);
  }
  std::stable_sort(d.table.begin(), d.table.end(),
                   [](const KernelTime& a, const KernelTime& b) { return a.total > b.total; });
  for (const TraceEvent& e : events) {
    if (e.kind == Kind::Step) d.steps += 1;
    if (e.kind != Kind::Launch) continue;
    d.launches += 1;
    d.launch_time += e.end - e.begin;
  }
}

const char* sentence(Gap::Cause cause) {
  switch (cause) {
    case Gap::Cause::Data: return "data was being prepared";
    case Gap::Cause::HostWait: return "the host had waited for the device";
    case Gap::Cause::Launch: return "launches came too slowly";
    case Gap::Cause::Other: return "the host was busy with other things";
  }
  fail("unknown cause of a gap");
}

template <class... Args>
std::string line(const char* format, Args... args) {
  char out[200];
  std::snprintf(out, sizeof out, format, args...);
  return out;
}

}  // namespace

Diagnosis diagnose(const std::vector<TraceEvent>& events) {
  Diagnosis d;
  Events kernels = kernels_of(events);
  add_up(d, kernels, events);
  if (kernels.empty()) return d;
  Interval span = span_of(kernels);
  d.span = span.length();
  std::vector<Interval> busy = times_of(kernels, Kind::Kernel, span);
  find_gaps(d, busy, span, events);
  find_overlap(d, kernels, length_of(busy), span);
  return d;
}

std::string to_text(const Diagnosis& d, size_t gaps, size_t kernels) {
  auto ms = [](int64_t ns) { return double(ns) / 1e6; };
  auto mean_us = [](int64_t ns, int64_t n) { return n > 0 ? double(ns) / double(n) / 1e3 : 0; };
  auto share = [&](int64_t ns) { return d.span > 0 ? 100 * double(ns) / double(d.span) : 0; };
  if (d.kernels == 0) return "diagnosis: no kernel was recorded\n";

  std::string out = line("diagnosis of %lld steps\n", static_cast<long long>(d.steps));
  out += line("  idle      %.1f %% of %.2f ms nothing was computed\n", share(d.idle), ms(d.span));
  for (Gap::Cause cause :
       {Gap::Cause::Data, Gap::Cause::HostWait, Gap::Cause::Launch, Gap::Cause::Other})
    if (d.lost[size_t(cause)] > 0)
      out += line("            %5.1f %%  %s\n", share(d.lost[size_t(cause)]), sentence(cause));
  for (size_t i = 0; i < std::min(gaps, d.gaps.size()); ++i) {
    const Gap& g = d.gaps[i];
    out +=
        line("  gap       %8.3f ms at %.3f ms: %s", ms(g.length), ms(g.begin), sentence(g.cause));
    out += g.meanwhile.empty() ? "\n" : " (" + g.meanwhile + ")\n";
  }
  if (d.launches > 0)
    out +=
        line("  launches  %.1f us each, kernels %.1f us: %s\n", mean_us(d.launch_time, d.launches),
             mean_us(d.kernel_time, d.kernels),
             d.launch_bound() ? "launch-bound, the device waits for the host" : "not launch-bound");
  out +=
      line("  waits     %.1f %% of the time the host waited for the device\n", share(d.host_wait));
  if (d.lanes > 1)
    out += line("  streams   %d: %.0f %% of what could overlap did%s\n", d.lanes, 100 * d.overlap,
                d.overlap < 0.1 ? ", they take turns" : "");
  out += line("  %-24s %8s %11s %10s %7s\n", "kernel", "calls", "total ms", "mean us", "share");
  for (size_t i = 0; i < std::min(kernels, d.table.size()); ++i) {
    const KernelTime& k = d.table[i];
    out += line("  %-24s %8lld %11.3f %10.1f %5.1f %%\n", k.name.c_str(),
                static_cast<long long>(k.calls), ms(k.total), mean_us(k.total, k.calls),
                100 * double(k.total) / double(std::max<int64_t>(1, d.kernel_time)));
  }
  if (d.table.size() > kernels)
    out += line("  and %lld others\n", static_cast<long long>(d.table.size() - kernels));
  return out;
}

std::unique_ptr<Trace> start_trace(const std::string& path, bool profile, Device device,
                                   int64_t steps) {
  if (path.empty() && !profile) return nullptr;
  TraceSchedule schedule;
  require(steps >= schedule.steps(), "a trace records steps ", schedule.wait + schedule.warmup + 1,
          " to ", schedule.steps(), ", but this run has ", steps, ": use --steps ",
          schedule.steps(), " or more");
  require(path.empty() || std::ofstream(path).is_open(), "--trace ", path, " cannot be written");
  return std::make_unique<Trace>(device, schedule);
}

void show_trace(const Recording& recording, const std::string& path, bool profile) {
  if (!path.empty()) write_trace(path, {recording});
  std::string out;
  if (!path.empty()) out = "trace     " + path + ": open it at ui.perfetto.dev\n";
  if (profile) out += to_text(diagnose(recording.events));
  std::printf("\n%s", out.c_str());
  std::fflush(stdout);
}

}  // namespace lockstep
