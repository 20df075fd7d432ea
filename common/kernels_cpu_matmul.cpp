// Matrix products on the CPU: OpenBLAS does the work of one thread, OpenMP shares the rows (or
// columns) of the result among threads. Sharing it ourselves keeps OpenBLAS single-threaded, so
// that ranks that are threads of one process do not fight over its one pool of workers.

#include <omp.h>

#include "common/kernels_cpu.h"

namespace lockstep::cpu {

Tensor widened(const Tensor& t) {
  if (t.dtype() != DType::BF16) return t;
  Tensor wide = Tensor::empty(t.shape(), DType::F32, Device::CPU, Category::Buffers);
  kernels(Device::CPU).cast(wide, t);
  return wide;
}

template <class T>
static void shared_gemm(const Tensor& c, const Tensor& a, Op ta, const Tensor& b, Op tb, T beta) {
  int m = int(c.dim(0)), n = int(c.dim(1)), k = int(a.dim(ta == Op::N ? 1 : 0));
  int lda = std::max(1, int(a.dim(1))), ldb = std::max(1, int(b.dim(1)));
  const T *pa = a.data<T>(), *pb = b.data<T>();
  T* pc = c.data<T>();
  if (k == 0) {
    for (int64_t i = 0; i < c.size(); ++i) pc[i] = beta == 0 ? T(0) : beta * pc[i];
    return;
  }
  bool by_rows = m >= n;
  int64_t length = by_rows ? m : n;
  int64_t parts = std::clamp<int64_t>(length / 16, 1, omp_get_max_threads());
  int64_t step = (length + parts - 1) / parts;
  parallel(parts, int64_t(m) * n / parts * k, [&](int64_t part) {
    int64_t first = part * step, count = std::min(length - first, step);
    if (count <= 0) return;
    if (by_rows) {
      const T* block = pa + first * (ta == Op::N ? lda : 1);
      gemm(ta, tb, int(count), n, k, block, lda, pb, ldb, beta, pc + first * n, n);
    } else {
      const T* block = pb + first * (tb == Op::N ? 1 : ldb);
      gemm(ta, tb, m, int(count), k, pa, lda, block, ldb, beta, pc + first, n);
    }
  });
}

static void matmul(const Tensor& c, const Tensor& a, Op ta, const Tensor& b, Op tb, float beta) {
  int64_t m = a.dim(ta == Op::N ? 0 : 1), k = a.dim(ta == Op::N ? 1 : 0);
  int64_t kb = b.dim(tb == Op::N ? 0 : 1), n = b.dim(tb == Op::N ? 1 : 0);
  require(k == kb && c.dim(0) == m && c.dim(1) == n, "a matmul of [", m, ", ", k, "] with [", kb,
          ", ", n, "] cannot give ", c.shape());
  require(a.dtype() == b.dtype(), "a matmul of ", name_of(a.dtype()), " with ", name_of(b.dtype()));
  if (c.size() == 0) return;
  Tensor wide_a = widened(a), wide_b = widened(b), wide_c = widened(c);
  if (wide_a.dtype() == DType::F64) {
    shared_gemm<double>(wide_c, wide_a, ta, wide_b, tb, beta);
  } else {
    shared_gemm<float>(wide_c, wide_a, ta, wide_b, tb, beta);
  }
  if (c.dtype() == DType::BF16) kernels(Device::CPU).cast(c, wide_c);
}

void add_matmul(Kernels& k) {
  openblas_set_num_threads(1);
  k.matmul = matmul;
}

}  // namespace lockstep::cpu
