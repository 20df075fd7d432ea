#pragma once
// The fp32 matmul ladder: c [m, n] = a [m, k] b [k, n], all row-major, on the ordinary fp32 units
// (no tensor cores, no TF32). A GPU of 132 multiprocessors with 128 such units each could do 67
// TFLOP/s, but memory delivers about 1 number in the time of 55 operations: each rung finds more
// use for a number that has been fetched once.
//
//   naive        coalesced       tile           coarse 1D, 2D      warp tile      pipelined
//   one thread   the 32 threads  a block keeps  a thread keeps     a warp works   the next tiles
//   per element  of a warp read  squares of a   a column, then a   on one small   are on their way
//                neighbours      and b shared   square of sums     rectangle      meanwhile
//
// All kernels have the same arguments; a rung is a kernel and the size of its tile.

#include "08_kernels/rung.h"

namespace lockstep::ladder {

using Sgemm = void (*)(float* c, const float* a, const float* b, int m, int n, int k);

// A block of `threads` computes `rows` x `columns` elements of c: blockIdx.y and .x say which.
struct Tile {
  int rows, columns, threads, shared_bytes = 0;
};

// even: the kernel for n and k divisible by 4 and aligned pointers, which may move 16 bytes at
// once.
MatmulRung sgemm_rung(const std::string& name, const std::string& idea, Sgemm kernel, Tile tile,
                      Sgemm even = nullptr);

MatmulRung sgemm_naive();
MatmulRung sgemm_coalesced();
MatmulRung sgemm_tile();
MatmulRung sgemm_coarse_1d();
MatmulRung sgemm_coarse_2d();
MatmulRung sgemm_vectorised();
MatmulRung sgemm_warp_tile();
MatmulRung sgemm_pipelined();

std::vector<MatmulRung> fp32_ladder();  // all of these, in this order
MatmulRung cublas_sgemm();              // what they are compared with: without TF32

}  // namespace lockstep::ladder
