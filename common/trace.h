#pragma once
// Where the time of a step goes, as a picture: a trace for chrome://tracing or ui.perfetto.dev.
//
//   CPU thread 0    | data | forward               | backward              | optimizer |
//                          |matmul|rope|attention|…          launches (on the CPU: executions)
//   CUDA stream 0              |  matmul  |rope| attention |…          when they really ran
//   network dp                              | all_reduce |        messages between ranks
//   memory          ▁▁▂▃▄▅▆▇▇▇▆▅▄▃▂▁   activations, weights, … in bytes
//
// A recording follows a schedule, because the first steps of a run are unlike all others and a
// trace of every step fills the disk:
//
//   step      1       2          3   4   5     6 …
//             wait    warm-up    active        done
//
// Warm-up does everything that recording does and throws the result away, so that what recording
// itself has to set up is not in the picture. Kernels need no change to be seen (traced_kernels.h).
//
// Times on the device come from pairs of events around each entry of the kernel table. An event is
// passed when the stream gets to it, which on an idle stream is before its kernel has arrived; so a
// kernel is taken to begin no earlier than its launch returned. Recording adds some microseconds to
// each launch: a program that waits for launches is slower while it is traced. Nsight Systems reads
// the hardware instead; for it every span is an NVTX range too.

#include <array>
#include <atomic>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "common/device.h"
#include "common/intervals.h"
#include "common/memory.h"
#include "common/traced_kernels.h"

namespace lockstep {

struct OperationTimes;  // operation_times.h
struct Stretch;

struct TraceEvent {
  enum class Kind : uint8_t {
    Step,           // a whole training step
    Host,           // a part of the program
    Data,           // a part that prepares data
    Wait,           // the host waits for the device
    Launch,         // the host hands work to a stream
    Kernel,         // work runs: on a stream, or on a CPU thread
    Instant,        // a moment
    Communication,  // an operation (comm.h) is under way
    Exposed,        // a stream or a CPU thread stands still for it
  };
  // CPU threads in the order in which the trace met them, and the stream that goes with each;
  // Network: Recording::networks[number].
  struct Lane {
    enum Type : uint8_t { Thread, Stream, Network } type = Thread;
    int number = 0;
    bool operator==(const Lane&) const = default;
  };
  std::string name;
  Kind kind = Kind::Host;
  Lane lane;
  int64_t begin = 0, end = 0;  // nanoseconds since the trace began
  int64_t step = 0;            // counted from 1
};

struct MemorySample {
  int64_t at = 0;
  std::array<int64_t, MemoryAccount::kCategories> bytes{};
};

// What one rank recorded. Times count from `wall_clock`, which all hosts share as well as they
// share the time of day, so recordings of several ranks can be laid side by side.
struct Recording {
  int rank = 0;
  int64_t wall_clock = 0;  // nanoseconds since 1970
  std::vector<TraceEvent> events;
  std::vector<MemorySample> memory;
  // Groups of ranks. One that has several operations under way at once has a lane for each: "dp",
  // "dp (2)", …
  std::vector<std::string> networks;
};

// One JSON file for any number of ranks, each a process in the picture.
void write_trace(const std::string& path, const std::vector<Recording>& ranks);

struct TraceSchedule {
  enum class Phase : uint8_t { Wait, Warmup, Active, Done };
  int64_t wait = 1, warmup = 1, active = 3, repeat = 1;  // repeat 0: to the end of the run
  Phase phase(int64_t step) const;                       // step counts from 0
  int64_t steps() const { return wait + warmup + active; }
};

// Of one rank. Its thread and any helper threads may record; each has a buffer of its own.
class Trace {
 public:
  explicit Trace(Device device, TraceSchedule schedule = {}, int rank = 0);

  // A training step has ended. True when a series of active steps ended with it: their device times
  // have been read, with one wait, and recording() has them.
  bool step();
  Device device() const { return device_; }
  TraceSchedule::Phase phase() const { return phase_; }
  const TraceSchedule& schedule() const { return schedule_; }
  void instant(std::string name);
  const Recording& recording() const { return recording_; }

  // For spans. A window is one phase of recording; what began in another is dropped.
  static constexpr int64_t kNothing = -1;
  int64_t window() const { return window_; }  // kNothing while nothing is recorded
  int64_t now() const;
  // To be recorded around work on this thread's stream; valid in this window.
  device::TimedPair* events();
  void add(int64_t window, std::string name, TraceEvent::Kind, int64_t begin, int64_t end);
  void add_on_stream(int64_t window, std::string name, int64_t launched,
                     const device::TimedPair* pair);
  void add(int64_t window, std::shared_ptr<const OperationTimes> operation);

 private:
  struct OnStream {
    std::string name;
    int64_t launched, step;
    const device::TimedPair* pair;
  };
  struct Communicated {
    std::shared_ptr<const OperationTimes> times;
    int64_t step;
  };
  struct Buffer {  // one per thread
    std::mutex mutex;
    std::thread::id thread;
    int number = 0;
    std::vector<TraceEvent> events;
    std::vector<OnStream> on_stream;
    std::vector<MemorySample> memory;
    std::vector<Communicated> operations;
    std::vector<std::unique_ptr<device::TimedPair>> pairs;
    size_t pairs_used = 0;
  };
  Buffer& buffer();
  void enter(TraceSchedule::Phase phase);
  void align_clocks();
  int64_t host_time(const device::TimedEvent& event) const;
  Interval time_of(const Stretch& stretch) const;
  void collect();
  struct OnNetwork {
    std::string group;
    TraceEvent event;
  };
  void collect(const Communicated& operation, int thread, std::vector<OnNetwork>& moving);
  void lay_out(std::vector<OnNetwork> moving);
  void forget();

  Device device_;
  TraceSchedule schedule_;
  int64_t origin_;  // of the steady clock
  std::atomic<TraceSchedule::Phase> phase_ = TraceSchedule::Phase::Wait;
  std::atomic<int64_t> window_ = kNothing, step_ = 0;
  int64_t windows_ = 0, step_begin_ = 0;
  std::mutex mutex_;  // of the list; each buffer has its own
  std::vector<std::unique_ptr<Buffer>> buffers_;
  std::unique_ptr<device::TimedEvent> mark_;  // a point in the stream and
  int64_t mark_at_ = 0;                       // when the host saw it pass
  Recording recording_;
};

// A part of the program on the calling thread. Its name lives as long as the span.
// Without a trace it costs one branch.
class Span {
 public:
  using Kind = TraceEvent::Kind;
  Span(Trace* trace, const char* name, Kind kind = Kind::Host) : trace_(trace) {
    if (trace_) start(name, kind);
  }
  ~Span() { end(); }
  Span(const Span&) = delete;
  Span& operator=(const Span&) = delete;
  // Ends this part and starts the one behind it.
  void next(const char* name, Kind kind = Kind::Host) {
    end();
    if (trace_) start(name, kind);
  }
  void end() {
    if (open_) finish();
  }

 private:
  void start(const char* name, Kind kind);
  void finish();

  Trace* trace_;
  const char* name_ = nullptr;
  Kind kind_ = Kind::Host;
  bool open_ = false;
  int64_t begin_ = 0, window_ = 0;
};

// One piece of work: on the CPU its execution; on CUDA its launch, and its execution in the
// thread's stream. Records nothing unless end() is reached, so a failing launch stays the error
// that it is.
class DeviceSpan {
 public:
  DeviceSpan(Trace* trace, const char* name, Device device) : trace_(trace) {
    if (trace_) start(name, device);
  }
  void end() {
    if (trace_) finish();
  }

 private:
  void start(const char* name, Device device);
  void finish();

  Trace* trace_;
  const char* name_ = nullptr;
  device::TimedPair* pair_ = nullptr;
  int64_t begin_ = 0, window_ = 0;
};

// The trace that kernels and waits of the calling thread belong to, null for none. Thread-local,
// like memory_account(): calls through the kernel table carry no trace, and ranks can be threads. A
// helper thread that works for a rank binds its parent's.
Trace* bound_trace();
// The same, but null also while it records nothing.
inline Trace* recording_trace() {
  Trace* trace = bound_trace();
  return trace && trace->window() != Trace::kNothing ? trace : nullptr;
}

// Binds a trace to the calling thread, and makes kernels show up in it. Null binds nothing.
class TraceScope {
 public:
  explicit TraceScope(Trace* trace);
  ~TraceScope();
  TraceScope(const TraceScope&) = delete;

 private:
  Trace* before_;
  std::optional<TracedKernels> kernels_;
};

}  // namespace lockstep
