#pragma once
// A tensor is a typed, contiguous block of memory with a shape. It has no strides and no gradient:
// copying a Tensor copies a handle, views share memory, and autograd lives in autograd.h.
// Throughout the code *dim* means a dimension of a tensor; *axis* means one of the device mesh.

#include <cstdint>
#include <memory>
#include <vector>

#include "common/dtype.h"
#include "common/memory.h"

namespace lockstep {

int64_t elements(const Shape& shape);  // product; 1 for a scalar {}

class Tensor {
 public:
  Tensor() = default;  // undefined: defined() is false
  static Tensor empty(Shape shape, DType dtype, Device device,
                      Category category = Category::Activations);
  static Tensor zeros(Shape shape, DType dtype, Device device,
                      Category category = Category::Activations);
  template <class T>
  static Tensor from(const std::vector<T>& values, Shape shape, Device device = Device::CPU,
                     Category category = Category::Activations);

  bool defined() const { return storage_ != nullptr; }
  const Shape& shape() const { return shape_; }
  int64_t dim(int i) const;  // negative counts from the end
  int64_t size() const { return size_; }
  int64_t bytes() const { return size_ * int64_t(size_of(dtype_)); }
  DType dtype() const { return dtype_; }
  Device device() const { return storage_->device(); }
  std::byte* raw() const { return storage_ ? storage_->data() + offset_ : nullptr; }
  template <class T>
  T* data() const;  // require()s that T is the element type

  Tensor view(Shape shape) const;                   // same elements, other shape
  Tensor flat(int64_t first, int64_t count) const;  // [count]: elements first, first+1, ...
  Tensor rows(int64_t first, int64_t count) const;  // a slice of dim 0
  Tensor like(Shape shape) const { return empty(std::move(shape), dtype_, device()); }
  Tensor like() const { return like(shape_); }
  Tensor to(Device device, Category category = Category::Activations) const;  // copies if it must
  template <class T>
  std::vector<T> values() const;  // on the host; waits for the device

  // Do these lie one behind the other in one block of memory? join() is then one tensor over all of
  // them, stacked along dim 0: how q|k|v become one matmul while each keeps its name.
  static bool neighbours(const std::vector<Tensor>& parts);
  static Tensor join(const std::vector<Tensor>& parts);

 private:
  std::shared_ptr<Storage> storage_;
  int64_t offset_ = 0, size_ = 0;  // offset in bytes, size in elements
  Shape shape_;
  DType dtype_ = DType::F32;
};

// Both in stream order. copy() needs equal sizes and element types; the devices may differ.
void copy(const Tensor& to, const Tensor& from);
void zero(const Tensor& t);

}  // namespace lockstep
