#pragma once
// The few things the rest of the code needs from a GPU beside kernels. device_cuda.cpp implements
// them; a build without CUDA links no_cuda.cpp, in which there is no GPU. All work of a rank is
// enqueued on that rank's own stream and runs in order; nothing here waits unless it says so.

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "common/memory.h"

namespace lockstep::device {

// Is there a GPU that this program can run on? If not, why_not() is one sentence (empty in a build
// without CUDA, where nobody asked).
bool available();
std::string why_not();
std::string name(Device device);  // e.g. "NVIDIA H200", "CPU"
int count();
// The GPU on which the calling thread works from now on, 0 to count() - 1. A process with a GPU of
// its own calls it before anything else touches one; a helper thread begins on GPU 0.
void use(int index);

void* allocate(size_t bytes);  // stream-ordered, from a pool that never shrinks
void deallocate(void* data);
void* allocate_pinned(size_t bytes);  // host memory that the GPU reads without staging
void deallocate_pinned(void* data);
void copy(void* to, Device to_device, const void* from, Device from_device, size_t bytes);
void fill(void* data, int byte, size_t bytes);
int64_t used_bytes();  // of the GPU's memory, by anyone: what is not free
void synchronize();    // waits until the rank's stream is empty
bool capturing();      // is what the rank enqueues captured into a graph, and does not run now?

// A point in the rank's stream that the host can wait for: how the loss is read one step late.
class Event {
 public:
  Event();
  ~Event();
  void record();
  void wait();          // the host waits
  void block_stream();  // the calling rank's stream waits, the host does not

 private:
  void* handle_ = nullptr;
};

// The same for measuring: when the stream came past this point, seconds after `earlier`.
class TimedEvent {
 public:
  TimedEvent();
  ~TimedEvent();
  TimedEvent(const TimedEvent&) = delete;
  void record();
  void record_in(void* stream);  // another stream of the rank: a cudaStream_t
  void wait();
  bool passed() const;  // also when CUDA has failed: others report that
  double seconds_since(const TimedEvent& earlier) const;  // waits until both have been passed

 private:
  void* handle_ = nullptr;
};
struct TimedPair {
  TimedEvent begin, end;
};

// A named range that NVIDIA's tools show (NVTX): Nsight Systems' timeline, Nsight Compute's filter.
// Costs a branch while no tool is attached. Ranges of a thread nest.
void push_range(const char* name);
void pop_range();

// One sentence if a GPU of compute capability major.minor cannot run code that was compiled for the
// architectures in `compiled` ("80 90a 100"; the lowest also as PTX, which any newer GPU compiles
// at start), else empty. Names the option that rebuilds for it.
std::string architecture_mismatch(const std::string& device_name, int major, int minor,
                                  const std::string& compiled);

}  // namespace lockstep::device
