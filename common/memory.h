#pragma once
// Where the bytes are. Every block of memory belongs to a category and to the account of the rank
// that asked for it, so that a program can say what a technique saves: bytes now, and the peak.

#include <array>
#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>

namespace lockstep {

enum class Device : uint8_t { CPU, CUDA };

enum class Category : uint8_t {
  Weights,      // parameters in the type they are computed with
  Gradients,    // their gradients
  Master,       // fp32 copies of 16-bit weights
  Moments,      // AdamW's m and v
  Activations,  // what forward leaves for backward, and what passes between operations
  Buffers,      // batches, communication buffers, work space of libraries
  Count
};
const char* name_of(Category category);

class MemoryAccount {
 public:
  static constexpr size_t kCategories = size_t(Category::Count);
  int64_t now(Category c) const { return now_[size_t(c)]; }
  int64_t peak(Category c) const { return peak_[size_t(c)]; }
  int64_t now() const { return total_; }
  int64_t peak() const { return peak_total_; }
  void reset_peaks();  // peaks start again from what is held now

  // Fresh memory is filled with bytes of 0xff (NaN in every floating type): tests use it to prove
  // that each kernel writes what it promises and reads nothing that nobody wrote.
  bool poison = false;

  // Called after every change: how a timeline is drawn.
  std::function<void()> on_change;

  void add(Category category, int64_t bytes);  // negative when memory goes back

 private:
  std::array<std::atomic<int64_t>, kCategories> now_{}, peak_{};
  std::atomic<int64_t> total_ = 0, peak_total_ = 0;
};

// The account of the calling thread. Thread-local because ranks can be threads of one process; a
// helper thread that works for a rank binds its parent's account first.
std::shared_ptr<MemoryAccount>& memory_account();

// A block of memory, freed with its last owner, on the books of the account it was taken from.
class Storage {
 public:
  Storage(int64_t bytes, Device device, Category category);
  ~Storage();
  Storage(const Storage&) = delete;
  Storage& operator=(const Storage&) = delete;

  std::byte* data() const { return data_; }
  int64_t bytes() const { return bytes_; }
  Device device() const { return device_; }

 private:
  std::shared_ptr<MemoryAccount> account_;
  std::byte* data_ = nullptr;
  int64_t bytes_;
  Device device_;
  Category category_;
};

}  // namespace lockstep
