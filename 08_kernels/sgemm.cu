#include "08_kernels/sgemm.h"
#include "common/kernels_cuda.h"

namespace lockstep::ladder {

static bool is_fp32(const Matmul& p) {
  return p.in == DType::F32 && p.out == DType::F32 && p.ta == Op::N && p.tb == Op::N &&
         p.beta == 0 && p.fits_int();
}

static bool is_aligned(const void* pointer) {
  return reinterpret_cast<uintptr_t>(pointer) % 16 == 0;
}

MatmulRung sgemm_rung(const std::string& name, const std::string& idea, Sgemm kernel, Tile tile,
                      Sgemm even) {
  auto launch = [=](const Matmul& p, cudaStream_t stream) {
    dim3 grid(unsigned(cuda::ceil_div(p.n, tile.columns)),
              unsigned(cuda::ceil_div(p.m, tile.rows)));
    if (grid.x == 0 || grid.y == 0) return;
    bool is_even = even && p.n % 4 == 0 && p.k % 4 == 0 && is_aligned(p.a) && is_aligned(p.b) &&
                   is_aligned(p.c);
    Sgemm chosen = is_even ? even : kernel;
    if (tile.shared_bytes > 48 * 1024)  // more than that has to be asked for
      check(cudaFuncSetAttribute(chosen, cudaFuncAttributeMaxDynamicSharedMemorySize,
                                 tile.shared_bytes));
    chosen<<<grid, unsigned(tile.threads), size_t(tile.shared_bytes), stream>>>(
        static_cast<float*>(p.c), static_cast<const float*>(p.a), static_cast<const float*>(p.b),
        int(p.m), int(p.n), int(p.k));
    check(cudaGetLastError());
  };
  auto takes = [tile](const Matmul& p) {
    return is_fp32(p) && cuda::ceil_div(p.m, tile.rows) <= cuda::kMostGridRows;
  };
  return {name, idea, takes, launch};
}

std::vector<MatmulRung> fp32_ladder() {
  return {sgemm_naive(),     sgemm_coalesced(),  sgemm_tile(),      sgemm_coarse_1d(),
          sgemm_coarse_2d(), sgemm_vectorised(), sgemm_warp_tile(), sgemm_pipelined()};
}

// cuBLAS reads matrices column by column, and what it takes for c^T = b^T a^T is our c = a b: b
// comes first, and n before m. Its default math mode never rounds fp32 to TF32.
MatmulRung cublas_sgemm() {
  auto launch = [](const Matmul& p, cudaStream_t) {
    if (p.m == 0 || p.n == 0) return;
    float one = 1, zero = 0;
    int k = int(p.k);
    check(cublasSgemm(cuda::blas().handle, CUBLAS_OP_N, CUBLAS_OP_N, int(p.n), int(p.m), k, &one,
                      static_cast<const float*>(p.b), int(p.n), static_cast<const float*>(p.a),
                      std::max(k, 1), &zero, static_cast<float*>(p.c), int(p.n)));
  };
  return {"cuBLAS", "the library, without TF32", is_fp32, launch};
}

}  // namespace lockstep::ladder
