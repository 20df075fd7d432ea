#pragma once
// How kernels are tested: on every device and element type there is, against plain loops in double
// precision that read the same (rounded) inputs. Every tensor lies between guards that the kernel
// must leave alone, and begins either at an aligned address or one element behind it; outputs hold
// NaN until they are written.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>
#include <string>
#include <vector>

#include "common/device.h"
#include "common/kernels.h"

namespace lockstep {

using Doubles = std::vector<double>;

struct Case {
  Device device;
  DType type;
  int64_t shift;  // elements between an aligned address and the tensors of this case
};

inline std::vector<Case> all_cases() {
  std::vector<Case> cases;
  for (int64_t shift : {0, 1}) {
    for (DType t : {DType::F64, DType::F32, DType::BF16}) cases.push_back({Device::CPU, t, shift});
    if (!device::available()) continue;
    for (DType t : {DType::F32, DType::BF16}) cases.push_back({Device::CUDA, t, shift});
  }
  return cases;
}

inline std::string name_of_case(const testing::TestParamInfo<Case>& info) {
  const Case& c = info.param;
  return text(c.device == Device::CPU ? "CPU_" : "CUDA_", name_of(c.type),
              c.shift ? "_shifted" : "");
}

// The same tensor in another type, on the CPU.
inline Tensor converted(const Tensor& t, DType type) {
  Tensor host = t.to(Device::CPU), result = Tensor::empty(t.shape(), type, Device::CPU);
  device::synchronize();
  kernels(Device::CPU).cast(result, host);
  return result;
}
inline Doubles read(const Tensor& t) { return converted(t, DType::F64).values<double>(); }
inline std::vector<std::byte> bytes_of(const Tensor& t) {
  Tensor host = t.to(Device::CPU);
  device::synchronize();
  return {host.raw(), host.raw() + host.bytes()};
}

class KernelTest : public testing::TestWithParam<Case> {
 protected:
  static constexpr int64_t kGuard = 64;
  static constexpr double kSentinel = 768;  // exact in every type

  void SetUp() override { memory_account()->poison = true; }
  void TearDown() override {
    memory_account()->poison = false;
    for (const Tensor& block : blocks_) {
      Doubles values = read(block);
      int64_t n = int64_t(values.size()), first = kGuard + GetParam().shift;
      for (int64_t i = 0; i < n; ++i) {
        bool is_guard = i < first || i >= n - kGuard;
        if (is_guard) {
          ASSERT_EQ(values[size_t(i)], kSentinel) << "guard " << i << " of " << n;
        }
      }
    }
  }

  DType type() const { return GetParam().type; }
  DType sums() const { return sum_type(type()); }
  Kernels& run() const { return kernels(GetParam().device); }
  // Gradients of weights come in the type of the activations or in fp32.
  std::vector<DType> gradient_types() const {
    if (type() == DType::BF16) return {DType::BF16, DType::F32};
    return {type()};
  }
  // Relative error that rounding may cause; `bf16` where more than the result is rounded.
  double tolerance(double bf16 = 6e-3) const {
    if (type() == DType::BF16) return bf16;
    return type() == DType::F32 ? 2e-5 : 1e-11;
  }

  Tensor with(const Shape& shape, const Doubles& values, DType t) {
    int64_t n = elements(shape), first = kGuard + GetParam().shift;
    Doubles all(size_t(first + n + kGuard), kSentinel);
    std::copy(values.begin(), values.end(), all.begin() + first);
    Tensor block = converted(Tensor::from(all, {int64_t(all.size())}), t);
    blocks_.push_back(block.to(GetParam().device));
    return blocks_.back().flat(first, n).view(shape);
  }
  Tensor with(const Shape& shape, const Doubles& values) { return with(shape, values, type()); }
  Tensor random(const Shape& shape, DType t, double std = 1) {
    Doubles values(size_t(elements(shape)));
    for (double& v : values) v = std * double(stream_.normal(drawn_++));
    return with(shape, values, t);
  }
  Tensor random(const Shape& shape) { return random(shape, type()); }
  Tensor output(const Shape& shape, DType t) {
    return with(shape, Doubles(size_t(elements(shape)), NAN), t);
  }
  Tensor output(const Shape& shape) { return output(shape, type()); }
  template <class T>
  Tensor integers(const std::vector<T>& values) const {
    return Tensor::from(values, {int64_t(values.size())}, GetParam().device);
  }

  // Errors are measured against the largest number in the reference, or against `largest`, that of
  // the numbers that were added up. The comparison is false for NaN.
  void expect_close(const Tensor& got, const Doubles& reference, double relative,
                    const std::string& what = "", double largest = 1e-30) {
    Doubles values = read(got);
    ASSERT_EQ(values.size(), reference.size()) << what;
    for (double r : reference) largest = std::max(largest, std::abs(r));
    for (size_t i = 0; i < values.size(); ++i)
      ASSERT_TRUE(std::abs(values[i] - reference[i]) <= relative * largest)
          << what << " element " << i << " of " << values.size() << ": " << values[i] << " is not "
          << reference[i];
  }

 private:
  std::vector<Tensor> blocks_;
  RandomStream stream_{11, "kernel tests"};
  uint64_t drawn_ = 0;
};

inline Doubles filled(int64_t n, const std::function<double(int64_t)>& f) {
  Doubles values(static_cast<size_t>(n));
  for (int64_t i = 0; i < n; ++i) values[size_t(i)] = f(i);
  return values;
}

}  // namespace lockstep
