#include "common/trace.h"

#include <algorithm>
#include <chrono>
#include <limits>
#include <map>

#include "common/check.h"
#include "common/operation_times.h"

namespace lockstep {

using Kind = TraceEvent::Kind;
using Lane = TraceEvent::Lane;
using Phase = TraceSchedule::Phase;

Phase TraceSchedule::phase(int64_t step) const {
  if (repeat > 0 && step >= repeat * steps()) return Phase::Done;
  int64_t at = step % steps();
  return at < wait ? Phase::Wait : at < wait + warmup ? Phase::Warmup : Phase::Active;
}

template <class Clock>
static int64_t nanoseconds() {
  return std::chrono::nanoseconds(Clock::now().time_since_epoch()).count();
}

Trace::Trace(Device device, TraceSchedule schedule, int rank)
    : device_(device), schedule_(schedule), origin_(nanoseconds<std::chrono::steady_clock>()) {
  require(
      schedule.wait >= 0 && schedule.warmup >= 0 && schedule.active >= 1 && schedule.repeat >= 0,
      "a trace cannot wait ", schedule.wait, ", warm up ", schedule.warmup, " and record ",
      schedule.active, " steps, ", schedule.repeat, " times: use at least 0, 0, 1 and 0");
  recording_.rank = rank;
  recording_.wall_clock = nanoseconds<std::chrono::system_clock>();
  enter(schedule_.phase(0));
}

int64_t Trace::now() const { return nanoseconds<std::chrono::steady_clock>() - origin_; }

bool Trace::step() {
  bool recorded = phase_ == Phase::Active;
  int64_t window = window_;
  if (recorded) add(window, "step", Kind::Step, step_begin_, now());
  Phase next = schedule_.phase(++step_);
  bool complete = recorded && (next != Phase::Active || step_ % schedule_.steps() == 0);
  if (complete) {
    window_ = kNothing;  // what follows is not part of any step
    collect();
  }
  if (complete || next != phase_) enter(next);
  step_begin_ = now();
  return complete;
}

void Trace::enter(Phase phase) {
  window_ = kNothing;
  forget();
  if (phase == Phase::Active && device_ == Device::CUDA) align_clocks();
  phase_ = phase;
  if (phase == Phase::Warmup || phase == Phase::Active) window_ = windows_++;
  step_begin_ = now();
}

// Which host time belongs to a point in the stream? The stream is empty, so an event is passed
// between the two looks at the clock; the try with the least time between them knows it best.
void Trace::align_clocks() {
  device::synchronize();
  int64_t least = std::numeric_limits<int64_t>::max();
  for (int i = 0; i < 10; ++i) {
    auto mark = std::make_unique<device::TimedEvent>();
    int64_t before = now();
    mark->record();
    mark->wait();
    int64_t after = now();
    if (after - before >= least) continue;
    least = after - before;
    mark_ = std::move(mark);
    mark_at_ = before + least / 2;
  }
}

Trace::Buffer& Trace::buffer() {
  std::lock_guard lock(mutex_);
  for (auto& b : buffers_)
    if (b->thread == std::this_thread::get_id()) return *b;
  buffers_.push_back(std::make_unique<Buffer>());
  Buffer& fresh = *buffers_.back();
  fresh.thread = std::this_thread::get_id();
  fresh.number = int(buffers_.size()) - 1;
  return fresh;
}

device::TimedPair* Trace::events() {
  Buffer& b = buffer();
  std::lock_guard lock(b.mutex);
  if (b.pairs_used == b.pairs.size()) b.pairs.push_back(std::make_unique<device::TimedPair>());
  return b.pairs[b.pairs_used++].get();
}

// A sample only where the account has changed: most spans move no memory.
static void sample(std::vector<MemorySample>& samples, int64_t at) {
  MemorySample s{.at = at};
  for (size_t c = 0; c < s.bytes.size(); ++c) s.bytes[c] = memory_account()->now(Category(c));
  if (samples.empty() || samples.back().bytes != s.bytes) samples.push_back(s);
}

void Trace::add(int64_t window, std::string name, Kind kind, int64_t begin, int64_t end) {
  Buffer& b = buffer();
  std::lock_guard lock(b.mutex);
  if (window == kNothing || window != window_) return;
  b.events.push_back({std::move(name), kind, {Lane::Thread, b.number}, begin, end, step_ + 1});
  sample(b.memory, end);
}

void Trace::add_on_stream(int64_t window, std::string name, int64_t launched,
                          const device::TimedPair* pair) {
  Buffer& b = buffer();
  std::lock_guard lock(b.mutex);
  if (window != kNothing && window == window_)
    b.on_stream.push_back({std::move(name), launched, step_ + 1, pair});
}

void Trace::add(int64_t window, std::shared_ptr<const OperationTimes> operation) {
  Buffer& b = buffer();
  std::lock_guard lock(b.mutex);
  if (window != kNothing && window == window_)
    b.operations.push_back({std::move(operation), step_ + 1});
}

void Trace::instant(std::string name) {
  int64_t at = now();
  add(window_, std::move(name), Kind::Instant, at, at);
}

void Trace::forget() {
  std::lock_guard lock(mutex_);
  for (auto& b : buffers_) {
    std::lock_guard inner(b->mutex);
    b->events.clear();
    b->on_stream.clear();
    b->operations.clear();
    b->memory.clear();
    b->pairs_used = 0;
  }
}

int64_t Trace::host_time(const device::TimedEvent& event) const {
  return mark_at_ + int64_t(1e9 * event.seconds_since(*mark_));
}

Interval Trace::time_of(const Stretch& s) const {
  if (s.in_stream) return {host_time(s.in_stream->begin), host_time(s.in_stream->end)};
  auto since_origin = [this](Stretch::Clock::time_point t) {
    return std::chrono::nanoseconds(t.time_since_epoch()).count() - origin_;
  };
  return {since_origin(s.begin), since_origin(s.end)};
}

// Its way through the network, and where its rank stood still for it. On a GPU that is the stream,
// and what the host did is one more part of the program.
void Trace::collect(const Communicated& operation, int thread, std::vector<OnNetwork>& moving) {
  const OperationTimes& times = *operation.times;
  std::string words = times.words();
  auto event = [&](std::string name, Kind kind, Lane lane, Interval at) {
    return TraceEvent{std::move(name), kind, lane, at.begin, at.end, operation.step};
  };
  auto by_the_clock = [&](Stretch s) {
    s.in_stream = nullptr;
    return time_of(s);
  };
  for (const Stretch* s : times.moving()) {
    Interval at = time_of(*s);
    if (times.under_way && s->in_stream)  // it begins no earlier than any kernel would
      at.begin = std::min(std::max(at.begin, by_the_clock(times.launch).end), at.end);
    moving.push_back({times.group, event(words, Kind::Communication, {Lane::Network}, at)});
  }
  std::vector<TraceEvent>& events = recording_.events;
  auto name_of = [&](const Stretch* s) {
    return text(s == &times.wait ? "wait " : "launch ", words);
  };
  for (const Stretch* s : times.still()) {
    Lane lane{s->in_stream ? Lane::Stream : Lane::Thread, thread};
    events.push_back(event(name_of(s), Kind::Exposed, lane, time_of(*s)));
  }
  if (times.device == Device::CPU) return;
  for (const Stretch* s : {&times.launch, &times.wait})
    if (s->happened())
      events.push_back(event(name_of(s), Kind::Host, {Lane::Thread, thread}, by_the_clock(*s)));
}

// Spans of one lane must not cross: where a group has several operations under way at once, each
// takes the first lane that is free.
void Trace::lay_out(std::vector<OnNetwork> moving) {
  std::stable_sort(moving.begin(), moving.end(), [](const OnNetwork& x, const OnNetwork& y) {
    return x.event.begin < y.event.begin;
  });
  std::map<std::string, int64_t> free_from;
  std::vector<std::string>& names = recording_.networks;
  for (OnNetwork& m : moving) {
    std::string lane = m.group;
    for (int k = 2; free_from[lane] > m.event.begin; ++k) lane = text(m.group, " (", k, ")");
    free_from[lane] = m.event.end;
    if (std::find(names.begin(), names.end(), lane) == names.end()) names.push_back(lane);
    m.event.lane.number = int(std::find(names.begin(), names.end(), lane) - names.begin());
    recording_.events.push_back(std::move(m.event));
  }
}

void Trace::collect() {
  if (device_ == Device::CUDA) device::synchronize();
  std::lock_guard lock(mutex_);
  std::vector<TraceEvent>& events = recording_.events;
  std::vector<OnNetwork> moving;
  for (auto& b : buffers_) {
    std::lock_guard inner(b->mutex);
    events.insert(events.end(), b->events.begin(), b->events.end());
    recording_.memory.insert(recording_.memory.end(), b->memory.begin(), b->memory.end());
    for (const Communicated& operation : b->operations) collect(operation, b->number, moving);
    for (const OnStream& work : b->on_stream) {
      int64_t end = host_time(work.pair->end), begin = host_time(work.pair->begin);
      begin = std::min(std::max(begin, work.launched), end);
      events.push_back({work.name, Kind::Kernel, {Lane::Stream, b->number}, begin, end, work.step});
    }
  }
  lay_out(std::move(moving));
  auto earlier = [](const TraceEvent& x, const TraceEvent& y) {
    return x.begin != y.begin ? x.begin < y.begin : x.end > y.end;  // what encloses comes first
  };
  std::stable_sort(events.begin(), events.end(), earlier);
  auto sooner = [](const MemorySample& x, const MemorySample& y) { return x.at < y.at; };
  std::stable_sort(recording_.memory.begin(), recording_.memory.end(), sooner);
}

void Span::start(const char* name, Kind kind) {
  name_ = name;
  kind_ = kind;
  open_ = true;
  device::push_range(name);
  window_ = trace_->window();
  begin_ = trace_->now();
}

void Span::finish() {
  open_ = false;
  int64_t end = trace_->now();
  device::pop_range();
  trace_->add(window_, name_, kind_, begin_, end);
}

// The events stand outside of what is timed as the launch: recording them costs as much again.
void DeviceSpan::start(const char* name, Device device) {
  name_ = name;
  window_ = trace_->window();
  device::push_range(name);
  if (device == Device::CUDA) {
    pair_ = trace_->events();
    pair_->begin.record();
  }
  begin_ = trace_->now();
}

void DeviceSpan::finish() {
  int64_t end = trace_->now();
  device::pop_range();
  if (pair_) {
    pair_->end.record();
    trace_->add_on_stream(window_, name_, end, pair_);
  }
  trace_->add(window_, name_, pair_ ? Kind::Launch : Kind::Kernel, begin_, end);
}

static Trace*& bound() {
  thread_local Trace* trace = nullptr;
  return trace;
}

Trace* bound_trace() { return bound(); }

TraceScope::TraceScope(Trace* trace) : before_(bound()) {
  bound() = trace;
  if (trace) kernels_.emplace();
}
TraceScope::~TraceScope() { bound() = before_; }

}  // namespace lockstep
