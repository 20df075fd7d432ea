// Is a matmul right? Every element is compared with its sum in double precision, on the GPU, by a
// kernel so plain that one can see that it is right.

#include <cmath>
#include <random>

#include "08_kernels/rung.h"
#include "common/device.h"
#include "common/kernels_cuda.h"

namespace lockstep::ladder {

using cuda::as;
using cuda::flat_grid;
using cuda::flat_index;
using cuda::for_type;

static const char* letter(Op op) { return op == Op::N ? "N" : "T"; }

std::string name_of(const Matmul& p) {
  return text(letter(p.tb), letter(p.ta), " ", p.m, " x ", p.n, " x ", p.k, " ", name_of(p.in),
              " -> ", name_of(p.out), p.beta == 0 ? "" : text(", beta ", p.beta));
}

static Shape shape_a(const Matmul& p) { return p.ta == Op::N ? Shape{p.m, p.k} : Shape{p.k, p.m}; }
static Shape shape_b(const Matmul& p) { return p.tb == Op::N ? Shape{p.k, p.n} : Shape{p.n, p.k}; }

static void fill_randomly(const Tensor& t, const char* what) {
  if (t.size() > 0) on(t).fill_normal(t, 1, RandomStream(std::random_device()(), what), {}, 0);
}

RandomMatmul::RandomMatmul(const Matmul& shape) : p_(shape) {
  a_ = Tensor::empty(shape_a(p_), p_.in, Device::CUDA);
  b_ = Tensor::empty(shape_b(p_), p_.in, Device::CUDA);
  c_ = Tensor::empty({p_.m, p_.n}, p_.out, Device::CUDA);
  fill_randomly(a_, "a"), fill_randomly(b_, "b"), fill_randomly(c_, "c");
  p_.a = a_.raw(), p_.b = b_.raw(), p_.c = c_.raw();
}

// By how much each element misses, as a multiple of what is allowed; NaN if it is NaN.
template <class In, class Out>
__global__ void misses_kernel(float* misses, Matmul p, const Out* before) {
  int64_t i = flat_index();
  if (i >= p.m * p.n) return;
  auto a = static_cast<const In*>(p.a);
  auto b = static_cast<const In*>(p.b);
  int64_t row = i / p.n, column = i % p.n;
  double sum = 0, sizes = 0;
  for (int64_t k = 0; k < p.k; ++k) {
    double x = double(float(a[p.ta == Op::N ? row * p.k + k : k * p.m + row]));
    double y = double(float(b[p.tb == Op::N ? k * p.n + column : column * p.k + k]));
    sum += x * y, sizes += fabs(x * y);
  }
  if (p.beta != 0) {
    double add = double(p.beta) * double(float(before[i]));
    sum += add, sizes += fabs(add);
  }
  double rounding = sizeof(Out) == 2 ? 0x1p-8 : 0x1p-24;  // half a unit in the last place, and
  double allowed =
      1e-5 * sizes + 1.01 * rounding * fabs(sum) + 1e-30;  // a little for the sum's own
  misses[i] = float(fabs(double(float(static_cast<const Out*>(p.c)[i])) - sum) / allowed);
}

// The matrix inside a block of memory that has guards on both sides.
struct Guarded {
  static constexpr int64_t kGuard = 128;  // elements
  Tensor block, matrix;

  Guarded(Shape shape, DType type, int64_t shift) {
    block = Tensor::empty({elements(shape) + 2 * kGuard + shift}, type, Device::CUDA);
    matrix = block.flat(kGuard + shift, elements(shape)).view(shape);
    device::fill(block.raw(), 0xff, size_t(block.bytes()));  // NaN in BF16 and F32
  }
  bool intact() const {
    Tensor host = block.to(Device::CPU);
    device::synchronize();
    int64_t first = matrix.raw() - block.raw(), behind = first + matrix.bytes();
    for (int64_t i = 0; i < host.bytes(); ++i)
      if ((i < first || i >= behind) && host.raw()[i] != std::byte(0xff)) return false;
    return true;
  }
};

std::string complaint_about(const MatmulRung& rung, Matmul p, int64_t shift) {
  Guarded a(shape_a(p), p.in, shift), b(shape_b(p), p.in, shift), c({p.m, p.n}, p.out, shift);
  fill_randomly(a.matrix, "a"), fill_randomly(b.matrix, "b");
  Tensor before = c.matrix.like();
  if (p.beta != 0) fill_randomly(c.matrix, "c");
  copy(before, c.matrix);
  p.a = a.matrix.raw(), p.b = b.matrix.raw(), p.c = c.matrix.raw();
  std::string what = text(rung.name, ", ", name_of(p), ": ");

  rung.launch(p, device::stream());
  check(cudaGetLastError());
  device::synchronize();
  if (!c.intact()) return what + "wrote outside of its result";

  Tensor misses = Tensor::empty({p.m, p.n}, DType::F32, Device::CUDA);
  for_type(p.in, [&](auto in) {
    for_type(p.out, [&](auto out) {
      using Out = decltype(out);
      cuda::launch(misses_kernel<decltype(in), Out>, flat_grid(misses.size(), 1), as<float>(misses),
                   p, as<const Out>(before));
    });
  });
  std::vector<float> values = misses.values<float>();
  for (int64_t i = 0; i < p.m * p.n; ++i)
    if (!(values[size_t(i)] <= 1))
      return what + text("element [", i / p.n, ", ", i % p.n, "] is ", values[size_t(i)],
                         " times as far from the sum in double precision as rounding allows");
  return "";
}

std::vector<Shape> odd_sizes() {
  return {{1, 1, 1}, {35, 79, 19},    {257, 1000, 33}, {1000, 1000, 1000},
          {5, 7, 0}, {520, 264, 200}, {520, 520, 7688}};
}

}  // namespace lockstep::ladder
