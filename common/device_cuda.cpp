// The GPU behind device.h.

#include "common/device_cuda.h"

#include <nvtx3/nvToolsExt.h>

#include <cstdlib>
#include <cstring>

#include "common/device.h"
#include "common/trace.h"

namespace lockstep::device {

// What the first look at the machine found; done once.
struct Found {
  int count = 0;
  std::string why_not;
};

static Found look() {
  // Kernels are loaded now and not on first use: loading one waits for the whole device, on which a
  // collective may be waiting for another rank. Read once, by the first CUDA call of the process.
  setenv("CUDA_MODULE_LOADING", "EAGER", 0);
  // Streams that share one of the GPU's queues (8 unless said otherwise) would wait for each other.
  setenv("CUDA_DEVICE_MAX_CONNECTIONS", "32", 0);
  Found found;
  cudaError_t status = cudaGetDeviceCount(&found.count);
  if (status != cudaSuccess || found.count == 0) {
    found.count = 0;
    const char* reason = status == cudaErrorInsufficientDriver
                             ? "no NVIDIA driver, or one too old for this CUDA"
                             : cudaGetErrorString(status);
    found.why_not = text("no usable GPU (", reason, ")");
    cudaGetLastError();  // a machine without a driver is no error to remember
    return found;
  }
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, 0));
  found.why_not = architecture_mismatch(properties.name, properties.major, properties.minor,
                                        LOCKSTEP_COMPILED_ARCHITECTURES);
  return found;
}

static const Found& found() {
  static const Found once = look();
  return once;
}

bool available() { return found().count > 0 && found().why_not.empty(); }
std::string why_not() { return found().why_not; }
int count() { return found().count; }

void use(int index) {
  require(index >= 0 && index < count(), "there is no GPU ", index, ": this program sees ",
          count());
  check(cudaSetDevice(index));
}

std::string name(Device device) {
  if (device == Device::CPU) return "CPU";
  int current = 0;
  check(cudaGetDevice(&current));
  cudaDeviceProp properties;
  check(cudaGetDeviceProperties(&properties, current));
  return properties.name;
}

// Lives as long as its thread; created on first use, on the device that is current then.
struct RankStream {
  cudaStream_t stream = nullptr;
  RankStream() {
    require(available(), why_not().empty() ? "no GPU" : why_not());
    check(cudaStreamCreateWithFlags(&stream, cudaStreamNonBlocking));
    int current = 0;
    check(cudaGetDevice(&current));
    cudaMemPool_t pool;
    check(cudaDeviceGetDefaultMemPool(&pool, current));
    uint64_t keep_everything = UINT64_MAX;
    check(cudaMemPoolSetAttribute(pool, cudaMemPoolAttrReleaseThreshold, &keep_everything));
  }
};

static thread_local cudaStream_t instead = nullptr;

OnStream::OnStream(cudaStream_t stream) { instead = stream; }
OnStream::~OnStream() { instead = nullptr; }

cudaStream_t stream() {
  if (instead) return instead;
  // Never destroyed: tensors of this thread may be freed after its thread-local objects are gone.
  thread_local RankStream* rank = new RankStream;
  return rank->stream;
}

void* allocate(size_t bytes) {
  void* data = nullptr;
  cudaError_t status = cudaMallocAsync(&data, bytes, stream());
  if (status == cudaErrorMemoryAllocation) {
    size_t free = 0, total = 0;
    cudaMemGetInfo(&free, &total);
    cudaGetLastError();
    fail(text("the GPU has no room for another ", bytes >> 20, " MiB (", total >> 20,
              " MiB in all): try a smaller --micro-batch or --sequence"));
  }
  check(status);
  return data;
}

// Called from destructors, which must not throw; a failing free means that the context is gone.
void deallocate(void* data) {
  if (data) cudaFreeAsync(data, stream());
}

void* allocate_pinned(size_t bytes) {
  void* data = nullptr;
  check(cudaMallocHost(&data, bytes));
  return data;
}
void deallocate_pinned(void* data) {
  if (data) cudaFreeHost(data);
}

void copy(void* to, Device to_device, const void* from, Device from_device, size_t bytes) {
  if (to_device == Device::CPU && from_device == Device::CPU) {
    std::memcpy(to, from, bytes);
  } else {
    DeviceSpan span(recording_trace(), "copy", Device::CUDA);
    check(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, stream()));
    span.end();
  }
}

void fill(void* data, int byte, size_t bytes) {
  DeviceSpan span(recording_trace(), "memset", Device::CUDA);
  check(cudaMemsetAsync(data, byte, bytes, stream()));
  span.end();
}

// A host that waits is worth a span: it launches nothing meanwhile.
int64_t used_bytes() {
  size_t free = 0, total = 0;
  if (available()) check(cudaMemGetInfo(&free, &total));
  return int64_t(total - free);
}

void synchronize() {
  Span span(recording_trace(), "synchronize", TraceEvent::Kind::Wait);
  if (available()) check(cudaStreamSynchronize(stream()));
}

bool capturing() {
  cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
  check(cudaStreamIsCapturing(stream(), &capture));
  return capture != cudaStreamCaptureStatusNone;
}

Event::Event() {
  if (!available()) return;
  cudaEvent_t event;
  check(cudaEventCreateWithFlags(&event, cudaEventDisableTiming));
  handle_ = event;
}
Event::~Event() {
  if (handle_) cudaEventDestroy(static_cast<cudaEvent_t>(handle_));
}
void Event::record() {
  if (handle_) check(cudaEventRecord(static_cast<cudaEvent_t>(handle_), stream()));
}
void Event::block_stream() {
  if (handle_) check(cudaStreamWaitEvent(stream(), static_cast<cudaEvent_t>(handle_)));
}
void Event::wait() {
  Span span(recording_trace(), "wait for event", TraceEvent::Kind::Wait);
  if (handle_) check(cudaEventSynchronize(static_cast<cudaEvent_t>(handle_)));
}

static cudaEvent_t event_of(void* handle) { return static_cast<cudaEvent_t>(handle); }

TimedEvent::TimedEvent() {
  if (!available()) return;
  cudaEvent_t event;
  check(cudaEventCreate(&event));
  handle_ = event;
}
TimedEvent::~TimedEvent() {
  if (handle_) cudaEventDestroy(event_of(handle_));
}
void TimedEvent::record() {
  if (handle_) check(cudaEventRecord(event_of(handle_), stream()));
}
void TimedEvent::record_in(void* stream) {
  if (handle_) check(cudaEventRecord(event_of(handle_), static_cast<cudaStream_t>(stream)));
}
bool TimedEvent::passed() const {
  return !handle_ || cudaEventQuery(event_of(handle_)) != cudaErrorNotReady;
}
void TimedEvent::wait() {
  if (handle_) check(cudaEventSynchronize(event_of(handle_)));
}
double TimedEvent::seconds_since(const TimedEvent& earlier) const {
  if (!handle_) return 0;
  check(cudaEventSynchronize(event_of(handle_)));
  float milliseconds = 0;
  check(cudaEventElapsedTime(&milliseconds, event_of(earlier.handle_), event_of(handle_)));
  return 1e-3 * double(milliseconds);
}

void push_range(const char* name) { nvtxRangePushA(name); }
void pop_range() { nvtxRangePop(); }

}  // namespace lockstep::device
