// What stands in for the GPU in a build without CUDA: there is none.

#include <cstring>

#include "common/device.h"
#include "common/kernels.h"
#include "common/reduce.h"

namespace lockstep {

namespace device {

bool available() { return false; }
std::string why_not() { return ""; }
int count() { return 0; }
std::string name(Device) { return "CPU"; }

[[noreturn]] static void no_gpu() { fail("this program was built without CUDA: use --device cpu"); }

void use(int) { no_gpu(); }
void* allocate(size_t) { no_gpu(); }
void deallocate(void*) {}
void* allocate_pinned(size_t) { no_gpu(); }
void deallocate_pinned(void*) {}
void copy(void* to, Device, const void* from, Device, size_t bytes) {
  std::memcpy(to, from, bytes);
}
void fill(void*, int, size_t) { no_gpu(); }
int64_t used_bytes() { return 0; }
void synchronize() {}
bool capturing() { return false; }

Event::Event() = default;
Event::~Event() = default;
void Event::record() {}
void Event::wait() {}
void Event::block_stream() {}

TimedEvent::TimedEvent() = default;
TimedEvent::~TimedEvent() = default;
void TimedEvent::record() {}
void TimedEvent::record_in(void*) {}
void TimedEvent::wait() {}
bool TimedEvent::passed() const { return true; }
double TimedEvent::seconds_since(const TimedEvent&) const { return 0; }

void push_range(const char*) {}
void pop_range() {}

}  // namespace device

void cuda::add_all(Kernels&) { device::no_gpu(); }
void cuda::reduce_in_rank_order(const Tensor&, std::span<const std::byte* const>, ReduceOp) {
  device::no_gpu();
}

}  // namespace lockstep
