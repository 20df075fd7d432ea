#include "common/tensor.h"

#include <cstring>

#include "common/device.h"

namespace lockstep {

int64_t elements(const Shape& shape) {
  int64_t n = 1;
  for (int64_t d : shape) n *= d;
  return n;
}

Tensor Tensor::empty(Shape shape, DType dtype, Device device, Category category) {
  for (int64_t d : shape) require(d >= 0, "a tensor cannot have the shape ", shape);
  Tensor t;
  t.size_ = elements(shape);
  t.shape_ = std::move(shape);
  t.dtype_ = dtype;
  t.storage_ = std::make_shared<Storage>(t.bytes(), device, category);
  return t;
}

Tensor Tensor::zeros(Shape shape, DType dtype, Device device, Category category) {
  Tensor t = empty(std::move(shape), dtype, device, category);
  zero(t);
  return t;
}

template <class T>
Tensor Tensor::from(const std::vector<T>& values, Shape shape, Device device, Category category) {
  require(elements(shape) == int64_t(values.size()), values.size(),
          " values cannot fill a tensor of ", "shape ", shape);
  Tensor host = empty(std::move(shape), dtype_of<T>, Device::CPU, category);
  if (!values.empty()) std::memcpy(host.raw(), values.data(), size_t(host.bytes()));
  return host.to(device, category);
}

int64_t Tensor::dim(int i) const {
  int rank = int(shape_.size());
  int at = i < 0 ? i + rank : i;
  require(at >= 0 && at < rank, "a tensor of shape ", shape_, " has no dim ", i);
  return shape_[size_t(at)];
}

template <class T>
T* Tensor::data() const {
  require(defined(), "an undefined tensor has no data");
  require(dtype_ == dtype_of<T>, "a tensor of ", name_of(dtype_), " was read as ",
          name_of(dtype_of<T>));
  return reinterpret_cast<T*>(raw());
}

Tensor Tensor::view(Shape shape) const {
  require(defined() && elements(shape) == size_, "a tensor of shape ", shape_,
          " cannot be viewed as ", shape);
  Tensor t = *this;
  t.shape_ = std::move(shape);
  return t;
}

Tensor Tensor::flat(int64_t first, int64_t count) const {
  require(defined() && first >= 0 && count >= 0 && first + count <= size_, "elements ", first,
          " to ", first + count, " were asked of a tensor with ", size_);
  Tensor t = *this;
  t.offset_ += first * int64_t(size_of(dtype_));
  t.size_ = count;
  t.shape_ = {count};
  return t;
}

Tensor Tensor::rows(int64_t first, int64_t count) const {
  require(dim(0) >= 0 && first >= 0 && count >= 0 && first + count <= dim(0), "rows ", first,
          " to ", first + count, " were asked of a tensor of shape ", shape_);
  int64_t width = 1;
  for (size_t i = 1; i < shape_.size(); ++i) width *= shape_[i];
  Shape shape = shape_;
  shape[0] = count;
  return flat(first * width, count * width).view(std::move(shape));
}

Tensor Tensor::to(Device device, Category category) const {
  if (device == this->device()) return *this;
  Tensor t = empty(shape_, dtype_, device, category);
  copy(t, *this);
  return t;
}

template <class T>
std::vector<T> Tensor::values() const {
  Tensor host = to(Device::CPU);
  if (device() == Device::CUDA) device::synchronize();
  const T* first = host.data<T>();
  return std::vector<T>(first, first + size_);
}

bool Tensor::neighbours(const std::vector<Tensor>& parts) {
  for (size_t i = 1; i < parts.size(); ++i) {
    const Tensor &a = parts[i - 1], &b = parts[i];
    if (a.storage_ != b.storage_ || a.dtype_ != b.dtype_ || a.offset_ + a.bytes() != b.offset_)
      return false;
  }
  return true;
}

Tensor Tensor::join(const std::vector<Tensor>& parts) {
  require(!parts.empty() && neighbours(parts), "these ", parts.size(),
          " tensors do not lie one behind the other in memory");
  Tensor t = parts[0];
  for (size_t i = 1; i < parts.size(); ++i) {
    t.shape_[0] += parts[i].dim(0);
    t.size_ += parts[i].size_;
  }
  require(elements(t.shape_) == t.size_, "tensors of different width were joined into ", t.shape_);
  return t;
}

void copy(const Tensor& to, const Tensor& from) {
  require(to.size() == from.size() && to.dtype() == from.dtype(), "a tensor of ", from.size(), " ",
          name_of(from.dtype()), " cannot be copied into one of ", to.size(), " ",
          name_of(to.dtype()));
  if (from.size() == 0) return;
  device::copy(to.raw(), to.device(), from.raw(), from.device(), size_t(from.bytes()));
}

void zero(const Tensor& t) {
  if (t.size() == 0) return;
  if (t.device() == Device::CUDA) {
    device::fill(t.raw(), 0, size_t(t.bytes()));
  } else {
    std::memset(t.raw(), 0, size_t(t.bytes()));
  }
}

#define LOCKSTEP_TENSOR_OF(T)                                                   \
  template Tensor Tensor::from(const std::vector<T>&, Shape, Device, Category); \
  template T* Tensor::data() const;                                             \
  template std::vector<T> Tensor::values() const;
LOCKSTEP_TENSOR_OF(double)
LOCKSTEP_TENSOR_OF(float)
LOCKSTEP_TENSOR_OF(bf16)
LOCKSTEP_TENSOR_OF(fp16)
LOCKSTEP_TENSOR_OF(int64_t)
LOCKSTEP_TENSOR_OF(int32_t)
LOCKSTEP_TENSOR_OF(uint16_t)
LOCKSTEP_TENSOR_OF(uint8_t)
#undef LOCKSTEP_TENSOR_OF

}  // namespace lockstep
