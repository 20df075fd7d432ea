#pragma once
// What a trace says, in sentences: why is a step as slow as it is?
//
//   compute    ███████     ████ █ █ █ █ █ █        ██████
//                     ▲        ▲                ▲
//            nothing to do:    launches come    the host waited for the device,
//            data is loaded,   too slowly       so nothing was queued behind it
//            or comes from
//            another rank
//
// A pure function of recorded events, and its text.

#include <algorithm>
#include <array>
#include <string>
#include <vector>

#include "common/trace.h"

namespace lockstep {

struct Gap {  // nothing ran on any compute lane
  enum class Cause : uint8_t { Data, Communication, HostWait, Launch, Other };
  Cause cause = Cause::Other;
  std::string meanwhile;  // the part of the program that took most of it
  int64_t begin = 0, length = 0;
  int64_t step = 0;
};

struct KernelTime {
  std::string name;
  int64_t calls = 0, total = 0;
};

// Times in nanoseconds.
struct Diagnosis {
  int64_t steps = 0;              // recorded
  int64_t span = 0;               // what was looked at, and of it:
  int64_t idle = 0;               // no compute lane was at work
  int64_t host_wait = 0;          // the host waited for the device
  std::vector<Gap> gaps;          // of the compute lanes, longest first
  std::array<int64_t, 5> lost{};  // idle time by Gap::Cause

  int64_t launches = 0, launch_time = 0;  // of the host
  int64_t kernels = 0, kernel_time = 0;
  // The host needs longer to launch a kernel than the device to run it, and the device did lack
  // launches. (The mean alone would not say so: with the queue full, a launch waits for room in
  // it.)
  bool launch_bound() const {
    bool slower = launches > 0 && kernels > 0 &&
                  double(launch_time) / double(launches) > double(kernel_time) / double(kernels);
    return slower && 10 * lost[size_t(Gap::Cause::Launch)] > span - idle;
  }

  int lanes = 0;  // compute lanes that were at work: CUDA streams, or CPU threads
  // Of the time that could have been hidden behind the busiest lane, the share that was: 0 when
  // lanes take turns, 1 when all others run beside it.
  double overlap = 0;

  // Between ranks: when messages were under way, and of that beside computation; and when the rank
  // stood still for them.
  int64_t communication = 0, hidden = 0, exposed = 0;
  // As good as nothing of what could run at once did.
  bool takes_turns() const { return 10 * hidden < std::min(communication, span - idle); }

  std::vector<KernelTime> table;  // by total time

  double idle_share() const { return span > 0 ? double(idle) / double(span) : 0; }
  double host_wait_share() const { return span > 0 ? double(host_wait) / double(span) : 0; }
};

Diagnosis diagnose(const std::vector<TraceEvent>& events);
std::string to_text(const Diagnosis& d, size_t gaps = 5, size_t kernels = 12);

// For programs. A trace that was asked for, by a file's name or by the wish for its diagnosis; null
// if by neither. Refuses a run too short to be recorded and a file that cannot be written.
std::unique_ptr<Trace> start_trace(const std::string& path, bool profile, Device device,
                                   int64_t steps);
// What was asked for: the file, the diagnosis, or both.
void show_trace(const Recording& recording, const std::string& path, bool profile);

}  // namespace lockstep
