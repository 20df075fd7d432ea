#include "common/comm_nccl_watch.h"

#include <algorithm>
#include <cstdio>
#include <cstdlib>

#include "common/device_cuda.h"

namespace lockstep {

using Clock = std::chrono::steady_clock;

cudaStream_t stream_of_messages() {
  int lowest = 0, highest = 0;
  check(cudaDeviceGetStreamPriorityRange(&lowest, &highest));
  cudaStream_t stream = nullptr;
  check(cudaStreamCreateWithPriority(&stream, cudaStreamNonBlocking, highest));
  return stream;
}

Moment::Moment() { check(cudaEventCreateWithFlags(&event_, cudaEventDisableTiming)); }
void Moment::record(cudaStream_t stream) { check(cudaEventRecord(event_, stream)); }
void Moment::block(cudaStream_t stream) const { check(cudaStreamWaitEvent(stream, event_)); }
bool Moment::passed() const { return cudaEventQuery(event_) != cudaErrorNotReady; }

// Ends the process at once: the thread that computes may be stuck inside NCCL or CUDA, where no
// exception reaches it, and tidying up would wait for kernels that never end.
[[noreturn]] static void stop(const std::string& sentence) {
  std::fputs(("error: " + sentence + "\n").c_str(), stderr);
  std::fflush(nullptr);
  std::_Exit(EXIT_FAILURE);
}

NcclWatch::NcclWatch() {
  int device = 0;
  check(cudaGetDevice(&device));
  thread_ = std::thread([this, device] { run(device); });
}

NcclWatch::~NcclWatch() {
  {
    std::lock_guard lock(mutex_);
    over_ = true;
  }
  changed_.notify_all();
  thread_.join();
}

void NcclWatch::run(int device) {
  cudaSetDevice(device);  // a thread begins on GPU 0, where this process may have no business
  // Asking about an event would spoil a graph that the rank is just capturing, unless said so.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  cudaThreadExchangeStreamCaptureMode(&mode);
  std::unique_lock lock(mutex_);
  while (!changed_.wait_for(lock, std::chrono::milliseconds(20), [&] { return over_; }))
    for (const auto& group : groups_) look_at(*group);
}

void NcclWatch::look_at(Group& group) {
  std::unique_lock quiet(group.in_nccl, std::try_to_lock);
  if (group.comm && quiet) {
    ncclResult_t error = ncclSuccess;
    ncclCommGetAsyncError(group.comm, &error);
    if (error != ncclSuccess && error != ncclInProgress)
      stop(text(group.who, ": NCCL failed in \"", group.name, "\": ", ncclGetErrorString(error),
                " (", ncclGetLastError(group.comm), ")"));
  }
  auto& operations = group.operations;
  while (!operations.empty() && operations.front()->launched && operations.front()->done.passed()) {
    operations.pop_front();
    group.started.reset();
  }
  if (operations.empty()) return;
  const NcclOperation& first = *operations.front();
  if (first.launched && !first.ready.passed()) {
    group.started.reset();
    return;
  }
  if (!group.started) group.started = Clock::now();
  if (Clock::now() - *group.started > std::chrono::duration<double>(first.time_limit))
    stop(text(group.who, " waited ", first.time_limit, " s for ", first.name, " (number ",
              first.number, " in \"", group.name, "\")"));
}

std::shared_ptr<NcclWatch::Group> NcclWatch::open(std::string who, std::string name,
                                                  double time_limit) {
  auto group = std::make_shared<Group>();
  group->who = std::move(who);
  group->name = std::move(name);
  group->time_limit = time_limit;
  std::lock_guard lock(mutex_);
  groups_.push_back(group);
  return group;
}

void NcclWatch::set_comm(Group& group, ncclComm_t comm) {
  std::lock_guard lock(mutex_);
  group.comm = comm;
}

void NcclWatch::close(const std::shared_ptr<Group>& group) {
  std::lock_guard lock(mutex_);
  groups_.remove(group);
}

std::shared_ptr<NcclOperation> NcclWatch::add(Group& group, const char* name, double time_limit,
                                              bool watched) {
  auto operation = std::make_shared<NcclOperation>();
  operation->name = name;
  operation->time_limit = time_limit;
  std::lock_guard lock(mutex_);
  operation->number = group.launches;
  if (watched) group.operations.push_back(operation);
  return operation;
}

// The host's stay inside a call. Should the call throw, the operation counts as over: CUDA says of
// an event that was never recorded that it has passed.
struct InCall {
  InCall(NcclWatch::Group& group, NcclOperation& operation)
      : lock(group.in_nccl), operation(operation) {}
  ~InCall() { operation.launched = true; }
  std::lock_guard<std::mutex> lock;
  NcclOperation& operation;
};

std::shared_ptr<NcclOperation> NcclWatch::launch(Group& group, const char* name, cudaStream_t from,
                                                 cudaStream_t stream,
                                                 const std::function<void()>& enqueue) {
  // What is captured into a graph does not run now, and may not be asked whether it has.
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(from, &capture));
  bool runs = capture == cudaStreamCaptureStatusNone;
  auto operation = add(group, name, group.time_limit, runs);
  ++group.launches;
  InCall call(group, *operation);
  operation->ready.record(from);
  operation->ready.block(stream);
  enqueue();
  operation->done.record(stream);
  return operation;
}

void NcclWatch::block(Group& group, const char* name, const std::function<void()>& call) {
  constexpr double kPatience = 60;  // setting up takes NCCL seconds, however short the time limit
  auto operation = add(group, name, std::max(kPatience, group.time_limit), true);
  InCall in_call(group, *operation);
  call();
}

}  // namespace lockstep
