#include "common/diagnose.h"

#include <algorithm>
#include <map>

#include "common/check.h"
#include "common/intervals.h"

namespace lockstep {

namespace {

using Kind = TraceEvent::Kind;
using Lane = TraceEvent::Lane;

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
  Events for_others;
  for (const TraceEvent* e : host)
    if (e->kind == Kind::Exposed) for_others.push_back(e);
  auto covered = [&](Kind kind) { return length_of(times_of(host, kind, gap)); };
  const TraceEvent* wait = wait_that_drained(waits, gap);
  if (2 * covered(Kind::Data) > g.length) {
    g.cause = Gap::Cause::Data;
  } else if (2 * covered(Kind::Exposed) > g.length) {
    g.cause = Gap::Cause::Communication;
    g.meanwhile += text(g.meanwhile.empty() ? "" : ", ", meanwhile(for_others, gap)->name);
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
    bool part = e.kind != Kind::Kernel && e.kind != Kind::Step && e.kind != Kind::Instant &&
                e.kind != Kind::Communication;
    if (!part) continue;
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

void find_communication(Diagnosis& d, const std::vector<Interval>& busy, const Interval& span,
                        const std::vector<TraceEvent>& events) {
  Events all;
  for (const TraceEvent& e : events) all.push_back(&e);
  std::vector<Interval> under_way = times_of(all, Kind::Communication, span);
  d.communication = length_of(under_way);
  d.hidden = common_length(under_way, busy);
  d.exposed = length_of(times_of(all, Kind::Exposed, span));
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
  find_communication(d, busy, span, events);
  return d;
}

}  // namespace lockstep
