#include "common/traced_kernels.h"

#include <algorithm>
#include <mutex>

#include "common/kernels.h"
#include "common/trace.h"

namespace lockstep {

// What was in the slots while wrappers are in them.
static Kernels& originals(Device device) {
  static Kernels cpu{}, cuda{};
  return device == Device::CPU ? cpu : cuda;
}

// A text that can be a template argument, so that each wrapper knows its name.
template <size_t n>
struct Literal {
  char text[n];
  constexpr Literal(const char (&from)[n]) { std::copy_n(from, n, text); }
};

template <Device device, Literal name, auto slot>
struct Wrapper;
template <Device device, Literal name, class... Args, void (*Kernels::*slot)(Args...)>
struct Wrapper<device, name, slot> {
  static void call(Args... args) {
    DeviceSpan span(recording_trace(), name.text, device);
    (originals(device).*slot)(args...);
    span.end();
  }
};

template <Literal name, auto slot>
struct Slot {
  template <Device device>
  static void wrap() {
    originals(device).*slot = kernels(device).*slot;
    kernels(device).*slot = Wrapper<device, name, slot>::call;
  }
  template <Device device>
  static void unwrap() {  // unless a program has put another kernel there meanwhile
    auto& now = kernels(device).*slot;
    if (now == &Wrapper<device, name, slot>::call) now = originals(device).*slot;
  }
};

template <class... Slots>
struct List {
  static constexpr size_t count = sizeof...(Slots);
  template <Device device>
  static void wrap() {
    (Slots::template wrap<device>(), ...);
  }
  template <Device device>
  static void unwrap() {
    (Slots::template unwrap<device>(), ...);
  }
};

// The language cannot list the members of a struct, so they are listed here.
using All =
    List<Slot<"matmul", &Kernels::matmul>, Slot<"embedding", &Kernels::embedding>,
         Slot<"embedding_backward", &Kernels::embedding_backward>,
         Slot<"rmsnorm", &Kernels::rmsnorm>, Slot<"rmsnorm_backward", &Kernels::rmsnorm_backward>,
         Slot<"rmsnorm_gain_backward", &Kernels::rmsnorm_gain_backward>,
         Slot<"rope", &Kernels::rope>, Slot<"attention", &Kernels::attention>,
         Slot<"attention_backward", &Kernels::attention_backward>,
         Slot<"attention_cached", &Kernels::attention_cached>, Slot<"swiglu", &Kernels::swiglu>,
         Slot<"swiglu_backward", &Kernels::swiglu_backward>, Slot<"add_bias", &Kernels::add_bias>,
         Slot<"bias_backward", &Kernels::bias_backward>, Slot<"dropout", &Kernels::dropout>,
         Slot<"cross_entropy", &Kernels::cross_entropy>,
         Slot<"cross_entropy_backward", &Kernels::cross_entropy_backward>,
         Slot<"vocab_statistics", &Kernels::vocab_statistics>,
         Slot<"vocab_cross_entropy", &Kernels::vocab_cross_entropy>,
         Slot<"add", &Kernels::add>, Slot<"add_into", &Kernels::add_into>,
         Slot<"cast", &Kernels::cast>, Slot<"fill", &Kernels::fill>,
         Slot<"fill_normal", &Kernels::fill_normal>, Slot<"sum_squares", &Kernels::sum_squares>,
         Slot<"begin_step", &Kernels::begin_step>, Slot<"add_loss", &Kernels::add_loss>,
         Slot<"local_sums", &Kernels::local_sums>,
         Slot<"begin_update", &Kernels::begin_update>, Slot<"adamw", &Kernels::adamw>>;
static_assert(sizeof(Kernels) == All::count * sizeof(void (*)()),
              "a kernel of the table is not in the list above: no trace would show it");

static std::mutex& installing() {
  static std::mutex mutex;
  return mutex;
}
static int& installed() {
  static int count = 0;
  return count;
}

TracedKernels::TracedKernels() {
  std::lock_guard lock(installing());
  if (installed()++ > 0) return;
  All::wrap<Device::CPU>();
  if (device::available()) All::wrap<Device::CUDA>();
}

TracedKernels::~TracedKernels() {
  std::lock_guard lock(installing());
  if (--installed() > 0) return;
  All::unwrap<Device::CPU>();
  if (device::available()) All::unwrap<Device::CUDA>();
}

}  // namespace lockstep
