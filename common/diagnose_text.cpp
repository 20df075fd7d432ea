// The sentences of a diagnosis, and what a program does with a trace that was asked for.

#include <cstdio>
#include <fstream>

#include "common/check.h"
#include "common/diagnose.h"

namespace lockstep {

static const char* sentence(Gap::Cause cause) {
  switch (cause) {
    case Gap::Cause::Data: return "data was being prepared";
    case Gap::Cause::Communication: return "the rank stood still for other ranks";
    case Gap::Cause::HostWait: return "the host had waited for the device";
    case Gap::Cause::Launch: return "launches came too slowly";
    case Gap::Cause::Other: return "the host was busy with other things";
  }
  fail("unknown cause of a gap");
}

template <class... Args>
static std::string line(const char* format, Args... args) {
  char out[200];
  std::snprintf(out, sizeof out, format, args...);
  return out;
}

std::string to_text(const Diagnosis& d, size_t gaps, size_t kernels) {
  auto ms = [](int64_t ns) { return double(ns) / 1e6; };
  auto mean_us = [](int64_t ns, int64_t n) { return n > 0 ? double(ns) / double(n) / 1e3 : 0; };
  auto share = [&](int64_t ns) { return d.span > 0 ? 100 * double(ns) / double(d.span) : 0; };
  if (d.kernels == 0) return "diagnosis: no kernel was recorded\n";

  std::string out = line("diagnosis of %lld steps\n", static_cast<long long>(d.steps));
  out += line("  idle      %.1f %% of %.2f ms nothing was computed\n", share(d.idle), ms(d.span));
  for (Gap::Cause cause : {Gap::Cause::Data, Gap::Cause::Communication, Gap::Cause::HostWait,
                           Gap::Cause::Launch, Gap::Cause::Other})
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
  if (d.communication > 0) {
    out +=
        line("  network   %.1f %% of the time messages were under way, %.0f %% of that hidden%s\n",
             share(d.communication), 100 * double(d.hidden) / double(d.communication),
             d.takes_turns() ? ": communication and computation take turns" : "");
    out += line("  exposed   %.1f %% of the time the rank stood still for other ranks\n",
                share(d.exposed));
  }
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
