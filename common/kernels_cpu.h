#pragma once
// Shared by the CPU kernels: loops over rows that several threads take part in, and sums whose
// order does not depend on how many threads there are.

#include <cblas.h>

#include <algorithm>
#include <vector>

#include "common/kernels.h"

namespace lockstep::cpu {

// body(i) for i in [0, n), spread over the rank's threads when there is enough work to share.
template <class Body>
void parallel(int64_t n, int64_t work_per_item, Body&& body) {
  constexpr int64_t kWorthSharing = 1 << 14;  // element operations
#pragma omp parallel for schedule(static) if (n > 1 && n * work_per_item > kWorthSharing)
  for (int64_t i = 0; i < n; ++i) body(i);
}

constexpr int64_t kChunk = 4096;
inline int64_t chunks(int64_t n) { return (n + kChunk - 1) / kChunk; }

// body(first, last) over pieces of [0, n).
template <class Body>
void parallel_ranges(int64_t n, Body&& body) {
  parallel(chunks(n), kChunk, [&](int64_t c) { body(c * kChunk, std::min(n, (c + 1) * kChunk)); });
}

// Sum of part(first, last) over fixed pieces, added in their order.
template <class Part>
double sum_in_order(int64_t n, Part&& part) {
  std::vector<double> sums(size_t(chunks(n)));
  parallel_ranges(
      n, [&](int64_t first, int64_t last) { sums[size_t(first / kChunk)] = part(first, last); });
  double sum = 0;
  for (double s : sums) sum += s;
  return sum;
}

// c [m, n] = op(a) op(b) + beta c for row-major matrices whose rows lie lda, ldb, ldc elements
// apart; on the calling thread alone.
inline CBLAS_TRANSPOSE blas(Op op) { return op == Op::N ? CblasNoTrans : CblasTrans; }

inline void gemm(Op ta, Op tb, int m, int n, int k, const float* a, int lda, const float* b,
                 int ldb, float beta, float* c, int ldc) {
  cblas_sgemm(CblasRowMajor, blas(ta), blas(tb), m, n, k, 1, a, lda, b, ldb, beta, c, ldc);
}
inline void gemm(Op ta, Op tb, int m, int n, int k, const double* a, int lda, const double* b,
                 int ldb, double beta, double* c, int ldc) {
  cblas_dgemm(CblasRowMajor, blas(ta), blas(tb), m, n, k, 1, a, lda, b, ldb, beta, c, ldc);
}

// The tensor in a type that BLAS computes with: itself, or an F32 copy of BF16.
Tensor widened(const Tensor& t);

}  // namespace lockstep::cpu
