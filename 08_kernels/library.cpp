// What every matmul is measured beside: cuBLASLt, at its best. For a shape it names several of its
// kernels, the likeliest first; the first is not always the fastest, so all are timed once and the
// fastest is kept.

#include <cublasLt.h>

#include <algorithm>
#include <map>
#include <memory>

#include "08_kernels/rung.h"
#include "common/device.h"
#include "common/device_cuda.h"

namespace lockstep::ladder {

namespace {

void check(cublasStatus_t status, Here here = {}) {
  if (status != CUBLAS_STATUS_SUCCESS) fail(cublasGetStatusString(status), here);
}

constexpr size_t kWorkspace = size_t(32) << 20;
constexpr int kCandidates = 16;

// One problem as cuBLASLt sees it: it reads rows as columns, so it is asked for c^T = b^T a^T.
struct Prepared {
  cublasLtMatmulDesc_t product = nullptr;
  cublasLtMatrixLayout_t a = nullptr, b = nullptr, c = nullptr;
  cublasLtMatmulAlgo_t algorithm{};
};

struct Library {
  cublasLtHandle_t handle = nullptr;
  Tensor workspace = Tensor::empty({int64_t(kWorkspace)}, DType::U8, Device::CUDA);
  std::map<std::string, Prepared> prepared;

  Library() { check(cublasLtCreate(&handle)); }

  void run(const Matmul& p, const Prepared& how, cudaStream_t stream) {
    float one = 1;
    check(cublasLtMatmul(handle, how.product, &one, p.b, how.b, p.a, how.a, &p.beta, p.c, how.c,
                         p.c, how.c, &how.algorithm, workspace.raw(), kWorkspace, stream));
  }

  Prepared prepare(const Matmul& p) {
    auto type = [](DType t) { return t == DType::BF16 ? CUDA_R_16BF : CUDA_R_32F; };
    auto layout = [&](DType t, int64_t rows, int64_t columns) {
      cublasLtMatrixLayout_t result;
      check(
          cublasLtMatrixLayoutCreate(&result, type(t), uint64_t(columns), uint64_t(rows), columns));
      return result;
    };
    auto transpose = [](Op op) { return op == Op::N ? CUBLAS_OP_N : CUBLAS_OP_T; };
    Prepared how;
    check(cublasLtMatmulDescCreate(&how.product, CUBLAS_COMPUTE_32F, CUDA_R_32F));
    cublasOperation_t first = transpose(p.tb), second = transpose(p.ta);
    check(cublasLtMatmulDescSetAttribute(how.product, CUBLASLT_MATMUL_DESC_TRANSA, &first,
                                         sizeof(first)));
    check(cublasLtMatmulDescSetAttribute(how.product, CUBLASLT_MATMUL_DESC_TRANSB, &second,
                                         sizeof(second)));
    how.a = p.ta == Op::N ? layout(p.in, p.m, p.k) : layout(p.in, p.k, p.m);
    how.b = p.tb == Op::N ? layout(p.in, p.k, p.n) : layout(p.in, p.n, p.k);
    how.c = layout(p.out, p.m, p.n);

    cublasLtMatmulPreference_t wishes;
    check(cublasLtMatmulPreferenceCreate(&wishes));
    check(cublasLtMatmulPreferenceSetAttribute(wishes, CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES,
                                               &kWorkspace, sizeof(kWorkspace)));
    cublasLtMatmulHeuristicResult_t found[kCandidates];
    int count = 0;
    check(cublasLtMatmulAlgoGetHeuristic(handle, how.product, how.b, how.a, how.c, how.c, wishes,
                                         kCandidates, found, &count));
    check(cublasLtMatmulPreferenceDestroy(wishes));
    require(count > 0, "cuBLASLt knows no way to compute ", name_of(p));
    std::vector<Run> candidates;
    for (int i = 0; i < count; ++i)
      candidates.push_back({"", "", [&, i](cudaStream_t stream) {
                              Prepared with = how;
                              with.algorithm = found[i].algo;
                              run(p, with, stream);
                            }});
    std::vector<double> seconds = time_in_turns(candidates, 5, 5e-4);
    size_t best = size_t(std::min_element(seconds.begin(), seconds.end()) - seconds.begin());
    how.algorithm = found[best].algo;
    return how;
  }
};

}  // namespace

MatmulRung cublaslt() {
  auto library = std::make_shared<Library>();
  return {"cuBLASLt", "the fastest kernel that its heuristic names",
          [](const Matmul& p) { return p.m * p.n * p.k > 0; },
          [library](const Matmul& p, cudaStream_t stream) {
            auto found = library->prepared.find(name_of(p));
            if (found == library->prepared.end())
              found = library->prepared.emplace(name_of(p), library->prepare(p)).first;
            library->run(p, found->second, stream);
          }};
}

}  // namespace lockstep::ladder
