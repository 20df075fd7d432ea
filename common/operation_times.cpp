#include "common/operation_times.h"

#include <cstdio>

#include "common/overlap_meter.h"
#include "common/trace.h"

namespace lockstep {

void Stretch::start(Device device) {
  if (device == Device::CUDA) {
    in_stream = std::make_shared<device::TimedPair>();
    in_stream->begin.record();
  }
  begin = Clock::now();
}

void Stretch::stop() {
  end = Clock::now();
  if (in_stream) in_stream->end.record();
}

int64_t Stretch::nanoseconds() const {
  if (in_stream) return int64_t(1e9 * in_stream->end.seconds_since(in_stream->begin));
  return std::chrono::nanoseconds(end - begin).count();
}

std::string OperationTimes::words() const {
  std::string out = text(name_of(operation), " ", group);
  if (payload == 0) return out;
  const char* units[] = {"B", "kB", "MB", "GB"};
  size_t unit = 0;
  double size = double(payload);
  for (; size >= 1000 && unit < 3; ++unit) size /= 1000;
  char number[32];
  std::snprintf(number, sizeof number, unit == 0 ? " %.0f " : " %.1f ", size);
  return text(out, number, units[unit]);
}

// On a GPU, where the host enqueues ahead of it, only what was measured in the stream counts.
std::vector<const Stretch*> OperationTimes::still() const {
  std::vector<const Stretch*> out;
  for (const Stretch* s : {&launch, &wait})
    if (s->happened() && (device == Device::CPU || s->in_stream)) out.push_back(s);
  return out;
}

std::vector<const Stretch*> OperationTimes::moving() const {
  if (under_way) return {&*under_way};
  return still();
}

std::shared_ptr<OperationTimes> start_times(Ledger& ledger) {
  OverlapMeter* meter = ledger.meter();
  Trace* trace = recording_trace();
  if (!meter && !trace) return nullptr;
  Device device = meter ? meter->device() : trace->device();
  // What is captured into a graph does not run now, and its events have no times.
  if (device == Device::CUDA && device::capturing()) return nullptr;
  const LedgerEntry& entry = ledger.entries().back();
  auto times = std::make_shared<OperationTimes>();
  times->operation = entry.operation;
  times->group = entry.group;
  times->payload = entry.payload;
  times->device = device;
  times->window = trace ? trace->window() : Trace::kNothing;
  // A barrier is over when its launch is.
  times->launch.start(entry.operation == Collective::Barrier ? device : Device::CPU);
  return times;
}

static void tell(const std::shared_ptr<OperationTimes>& times, Ledger& ledger) {
  if (OverlapMeter* meter = ledger.meter()) meter->add(times);
  if (Trace* trace = recording_trace()) trace->add(times->window, times);
}

class MeasuredState : public Work::State {
 public:
  MeasuredState(std::unique_ptr<Work::State> inner, std::shared_ptr<OperationTimes> times,
                Ledger& ledger)
      : inner_(std::move(inner)), times_(std::move(times)), ledger_(ledger) {}
  void wait() override {
    times_->wait.start(times_->device);
    inner_->wait();
    times_->wait.stop();
    tell(times_, ledger_);
  }

 private:
  std::unique_ptr<Work::State> inner_;
  std::shared_ptr<OperationTimes> times_;
  Ledger& ledger_;
};

std::unique_ptr<Work::State> measured(std::unique_ptr<Work::State> operation,
                                      std::shared_ptr<OperationTimes> times, Ledger& ledger) {
  times->launch.stop();
  if (operation)
    return std::make_unique<MeasuredState>(std::move(operation), std::move(times), ledger);
  tell(times, ledger);
  return nullptr;
}

}  // namespace lockstep
