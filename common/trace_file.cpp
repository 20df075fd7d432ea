// The JSON that chrome://tracing and ui.perfetto.dev read: "Trace Event Format" (Google, the
// Chromium project). X: a span, C: counters, i: a moment, M: names. Times are microseconds.

#include <algorithm>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>

#include "common/check.h"
#include "common/trace.h"

namespace lockstep {

using nlohmann::json;
using Lane = TraceEvent::Lane;

static const char* name_of(TraceEvent::Kind kind) {
  switch (kind) {
    case TraceEvent::Kind::Step: return "step";
    case TraceEvent::Kind::Host: return "host";
    case TraceEvent::Kind::Data: return "data";
    case TraceEvent::Kind::Wait: return "wait";
    case TraceEvent::Kind::Launch: return "launch";
    case TraceEvent::Kind::Kernel: return "kernel";
    case TraceEvent::Kind::Instant: return "instant";
    case TraceEvent::Kind::Communication: return "communication";
    case TraceEvent::Kind::Exposed: return "exposed";
  }
  fail("unknown kind of trace event");
}

// Viewers sort lanes by these numbers: threads, streams, the network.
static int lane_id(const Lane& lane) { return 1000 * lane.type + lane.number; }

static std::string words(const Lane& lane, const std::vector<std::string>& networks) {
  switch (lane.type) {
    case Lane::Thread: return text("CPU thread ", lane.number);
    case Lane::Stream: return text("CUDA stream ", lane.number);
    case Lane::Network: return text("network ", networks.at(size_t(lane.number)));
  }
  fail("unknown type of a lane");
}

static json of(const TraceEvent& e, int rank, int64_t shift) {
  json out = {{"name", e.name},
              {"cat", name_of(e.kind)},
              {"pid", rank},
              {"tid", lane_id(e.lane)},
              {"ts", double(e.begin + shift) / 1e3},
              {"args", {{"step", e.step}}}};
  if (e.kind == TraceEvent::Kind::Instant) {
    out["ph"] = "i";
    out["s"] = "t";  // belongs to its thread
  } else {
    out["ph"] = "X";
    out["dur"] = double(e.end - e.begin) / 1e3;
  }
  return out;
}

static json of(const MemorySample& s, int rank, int64_t shift) {
  json bytes;
  for (size_t c = 0; c < s.bytes.size(); ++c) bytes[name_of(Category(c))] = s.bytes[c];
  return {{"name", "memory"}, {"ph", "C"},     {"pid", rank},
          {"tid", 0},         {"args", bytes}, {"ts", double(s.at + shift) / 1e3}};
}

static json name(const char* what, int rank, int lane, const std::string& name) {
  return {{"name", what}, {"ph", "M"}, {"pid", rank}, {"tid", lane}, {"args", {{"name", name}}}};
}

void write_trace(const std::string& path, const std::vector<Recording>& ranks) {
  int64_t first = std::numeric_limits<int64_t>::max();
  for (const Recording& r : ranks) first = std::min(first, r.wall_clock);

  std::ofstream file(path);
  require(file.is_open(), "the trace ", path, " cannot be written");
  file << R"({"displayTimeUnit": "ms", "traceEvents": [)";
  const char* separator = "\n";
  auto write = [&](const json& event) {
    file << separator << event.dump();
    separator = ",\n";
  };
  for (const Recording& r : ranks) {
    int64_t shift = r.wall_clock - first;
    write(name("process_name", r.rank, 0, text("rank ", r.rank)));
    std::vector<Lane> named;
    for (const TraceEvent& e : r.events) {
      if (std::find(named.begin(), named.end(), e.lane) != named.end()) continue;
      named.push_back(e.lane);
      write(name("thread_name", r.rank, lane_id(e.lane), words(e.lane, r.networks)));
    }
    for (const TraceEvent& e : r.events) write(of(e, r.rank, shift));
    for (const MemorySample& s : r.memory) write(of(s, r.rank, shift));
  }
  file << "\n]}\n";
  file.close();
  require(file.good(), "the trace ", path, " could not be written: is the disk full?");
}

}  // namespace lockstep
