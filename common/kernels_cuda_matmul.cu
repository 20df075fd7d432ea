// Matrix products on CUDA: cuBLASLt, sums in fp32 (for F32 inputs in true fp32, not TF32).
//
// cuBLAS stores matrices column by column, our tensors row by row. The bytes of a row-major matrix,
// read column-major, are its transpose. So we never transpose anything: we ask for
//   c^T = op(b)^T op(a)^T
// by handing over b first and a second, each with the Op it came with, and M and N swapped. Square
// matrices hide a mistake here; test with shapes whose three sizes differ.
//
// Which of its many kernels suits a shape is cuBLASLt's own guess, asked for once per shape.

#include <cublasLt.h>

#include <compare>
#include <map>

#include "common/kernels_cuda.h"

namespace lockstep::cuda {

static Blas make_blas() {
  Blas b;
  check(cublasCreate(&b.handle));
  check(cudaMalloc(&b.workspace, Blas::kWorkspace));
  check(cublasSetStream(b.handle, device::stream()));  // resets the work space, so this comes first
  check(cublasSetWorkspace(b.handle, b.workspace, Blas::kWorkspace));
  // Long sums that several blocks share are also joined in fp32.
  check(cublasSetMathMode(b.handle, CUBLAS_MATH_DISALLOW_REDUCED_PRECISION_REDUCTION));
  return b;
}

Blas& blas() {
  // Never destroyed: at the end of a thread the GPU may still be using its work space.
  thread_local Blas* rank = new Blas(make_blas());
  return *rank;
}

// All that cuBLASLt's choice may depend on.
struct Request {
  int64_t m, n, k;
  Op ta, tb;
  DType in, out;
  bool adds;
  uint32_t align_a, align_b, align_c;
  auto operator<=>(const Request&) const = default;
};

struct Plan {
  cublasLtMatmulDesc_t product = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr;
  cublasLtMatmulAlgo_t algorithm{};
};

static uint32_t alignment(const Tensor& t) {
  uint32_t bytes = 256;
  while (reinterpret_cast<uintptr_t>(t.raw()) % bytes) bytes /= 2;
  return bytes;
}

// A row-major [rows, columns] tensor as cuBLASLt sees it.
static cublasLtMatrixLayout_t layout(DType type, int64_t rows, int64_t columns) {
  cublasLtMatrixLayout_t result;
  check(cublasLtMatrixLayoutCreate(&result, blas_type(type), uint64_t(columns), uint64_t(rows),
                                   columns));
  return result;
}

static cublasLtMatmulPreference_t preference(const Request& r) {
  cublasLtMatmulPreference_t result;
  check(cublasLtMatmulPreferenceCreate(&result));
  auto set = [&](cublasLtMatmulPreferenceAttributes_t name, auto value) {
    check(cublasLtMatmulPreferenceSetAttribute(result, name, &value, sizeof(value)));
  };
  set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, uint64_t(Blas::kWorkspace));
  set(CUBLASLT_MATMUL_PREF_REDUCTION_SCHEME_MASK, uint32_t(CUBLASLT_REDUCTION_SCHEME_COMPUTE_TYPE));
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, r.align_b);  // their A is our b
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, r.align_a);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, r.align_c);
  set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, r.align_c);
  return result;
}

static cublasLtHandle_t lt() {  // a cuBLAS handle is also one of cuBLASLt, by NVIDIA's manual
  return reinterpret_cast<cublasLtHandle_t>(blas().handle);
}

static Plan make_plan(const Request& r) {
  Plan plan;
  check(cublasLtMatmulDescCreate(&plan.product, CUBLAS_COMPUTE_32F, CUDA_R_32F));
  cublasOperation_t first = blas_op(r.tb), second = blas_op(r.ta);
  check(cublasLtMatmulDescSetAttribute(plan.product, CUBLASLT_MATMUL_DESC_TRANSA, &first,
                                       sizeof(first)));
  check(cublasLtMatmulDescSetAttribute(plan.product, CUBLASLT_MATMUL_DESC_TRANSB, &second,
                                       sizeof(second)));
  plan.a = r.ta == Op::N ? layout(r.in, r.m, r.k) : layout(r.in, r.k, r.m);
  plan.b = r.tb == Op::N ? layout(r.in, r.k, r.n) : layout(r.in, r.n, r.k);
  plan.c = layout(r.out, r.m, r.n);

  cublasLtMatmulPreference_t wishes = preference(r);
  cublasLtMatmulHeuristicResult_t found{};
  int count = 0;
  cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(lt(), plan.product, plan.b, plan.a, plan.c,
                                                         plan.c, wishes, 1, &found, &count);
  check(cublasLtMatmulPreferenceDestroy(wishes));
  require(status == CUBLAS_STATUS_SUCCESS && count == 1, "cuBLASLt knows no way to multiply [", r.m,
          ", ", r.k, "] by [", r.k, ", ", r.n, "] in ", name_of(r.in), " into ", name_of(r.out),
          " (", cublasGetStatusString(status), ")");
  plan.algorithm = found.algo;
  return plan;
}

static const Plan& plan_for(const Request& r) {
  thread_local auto* plans = new std::map<Request, Plan>;  // lives as long as the handle
  auto found = plans->find(r);
  if (found == plans->end()) found = plans->emplace(r, make_plan(r)).first;
  return found->second;
}

template <class T>
__global__ void scale_kernel(T* c, float factor, int64_t n) {
  int64_t i = flat_index();
  if (i < n) c[i] = rounded<T>(factor * float(c[i]));
}

// c = beta c: what is left of a product over no terms.
static void scale(const Tensor& c, float beta) {
  if (beta == 0) return zero(c);  // whatever it held, NaN too
  for_type(c.dtype(), [&](auto type) {
    using T = decltype(type);
    launch(scale_kernel<T>, flat_grid(c.size(), 1), as<T>(c), beta, c.size());
  });
}

static void matmul(const Tensor& c, const Tensor& a, Op ta, const Tensor& b, Op tb, float beta) {
  require(a.shape().size() == 2 && b.shape().size() == 2 && c.shape().size() == 2,
          "a matmul takes matrices, not ", a.shape(), " and ", b.shape(), " into ", c.shape());
  int64_t m = a.dim(ta == Op::N ? 0 : 1), k = a.dim(ta == Op::N ? 1 : 0);
  int64_t kb = b.dim(tb == Op::N ? 0 : 1), n = b.dim(tb == Op::N ? 1 : 0);
  require(k == kb && c.dim(0) == m && c.dim(1) == n, "a matmul of [", m, ", ", k, "] with [", kb,
          ", ", n, "] cannot give ", c.shape());
  for (DType type : {a.dtype(), c.dtype()}) for_type(type, [](auto) {});  // refuses F64
  require(a.dtype() == b.dtype() && (c.dtype() == a.dtype() || c.dtype() == DType::F32),
          "a matmul of ", name_of(a.dtype()), " with ", name_of(b.dtype()), " into ",
          name_of(c.dtype()), ": the inputs must have one type, the result that type or F32");
  expect("a", a, m * k, a.dtype());
  expect("b", b, k * n, a.dtype());
  expect("c", c, m * n, c.dtype());
  if (c.size() == 0) return;
  if (k == 0) return scale(c, beta);

  const Plan& plan = plan_for(
      {m, n, k, ta, tb, a.dtype(), c.dtype(), beta != 0, alignment(a), alignment(b), alignment(c)});
  float one = 1;
  check(cublasLtMatmul(lt(), plan.product, &one, b.raw(), plan.b, a.raw(), plan.a, &beta, c.raw(),
                       plan.c, c.raw(), plan.c, &plan.algorithm, blas().workspace, Blas::kWorkspace,
                       device::stream()));
}

void add_matmul(Kernels& k) { k.matmul = matmul; }

}  // namespace lockstep::cuda
