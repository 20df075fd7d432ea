#include "common/memory.h"

#include <cstdlib>
#include <cstring>

#include "common/check.h"
#include "common/device.h"

namespace lockstep {

const char* name_of(Category category) {
  switch (category) {
    case Category::Weights: return "weights";
    case Category::Gradients: return "gradients";
    case Category::Master: return "master weights";
    case Category::Moments: return "moments";
    case Category::Activations: return "activations";
    case Category::Buffers: return "buffers";
    case Category::Count: break;
  }
  fail("unknown memory category");
}

static void raise_to(std::atomic<int64_t>& peak, int64_t value) {
  int64_t seen = peak;
  while (seen < value && !peak.compare_exchange_weak(seen, value)) {
  }
}

void MemoryAccount::add(Category category, int64_t bytes) {
  size_t c = size_t(category);
  raise_to(peak_[c], now_[c] += bytes);
  raise_to(peak_total_, total_ += bytes);
  if (on_change) on_change();
}

void MemoryAccount::reset_peaks() {
  for (size_t c = 0; c < kCategories; ++c) peak_[c] = now_[c].load();
  peak_total_ = total_.load();
}

std::shared_ptr<MemoryAccount>& memory_account() {
  thread_local auto account = std::make_shared<MemoryAccount>();
  return account;
}

// One cache line, and what vector loads and the tensor cores' copy engine ask for.
static constexpr size_t kAlignment = 64;

Storage::Storage(int64_t bytes, Device device, Category category)
    : account_(memory_account()), bytes_(bytes), device_(device), category_(category) {
  require(bytes >= 0, "a block of ", bytes, " bytes was asked for");
  if (bytes > 0) {
    if (device == Device::CUDA) {
      data_ = static_cast<std::byte*>(device::allocate(size_t(bytes)));
      if (account_->poison) device::fill(data_, 0xff, size_t(bytes));
    } else {
      size_t rounded = (size_t(bytes) + kAlignment - 1) / kAlignment * kAlignment;
      data_ = static_cast<std::byte*>(std::aligned_alloc(kAlignment, rounded));
      require(data_ != nullptr, "no memory for ", bytes, " bytes of ", name_of(category),
              " beside the ", account_->now(), " bytes already held");
      if (account_->poison) std::memset(data_, 0xff, size_t(bytes));
    }
  }
  account_->add(category_, bytes_);
}

Storage::~Storage() {
  account_->add(category_, -bytes_);
  if (device_ == Device::CUDA) {
    device::deallocate(data_);
  } else {
    std::free(data_);
  }
}

}  // namespace lockstep
