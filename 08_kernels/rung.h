#pragma once
// A ladder leads from the first kernel that is right to one that is fast. A rung is one file: a
// kernel and one launch(). Everything else is shared and stands here:
//
//     Rung<Problem>           what a rung is          ladder = a list of them: bf16_ladder(), ...
//     complaint_about()       is it right?            before any of its times means anything
//     time_in_turns()         how long does it take?  A B A B ... beside what it is compared with
//     print, save_csv, draw   what came out
//
// All times are taken on the GPU, between two events in the stream: a launch returns long before
// the kernel has run, so a clock on the host would time the launch.

#include <cuda_runtime.h>

#include <algorithm>
#include <functional>
#include <string>
#include <vector>

#include "common/kernels.h"

namespace lockstep::ladder {

// c [m, n] = op(a) op(b) + beta c. All matrices are row-major and without gaps: a is [m, k] for
// Op::N and [k, m] for Op::T, b is [k, n] or [n, k]. Sums are fp32. in: BF16 or F32; out: the same,
// or F32. m, n, k may be anything, 0 as well, and pointers need no more than their type's
// alignment.
struct Matmul {
  int64_t m = 0, n = 0, k = 0;
  Op ta = Op::N, tb = Op::N;
  DType in = DType::BF16, out = DType::BF16;
  float beta = 0;
  const void *a = nullptr, *b = nullptr;
  void* c = nullptr;

  double flops() const { return 2.0 * double(m) * double(n) * double(k); }
  // Can a kernel count rows, columns and depth in int, up to the end of a tile that is cut off?
  bool fits_int() const { return std::max({m, n, k}) <= INT32_MAX - 1024; }
};
// "TN 4096 x 4096 x 4096 BF16 -> BF16". The letters are in the order of BLAS, which thinks in
// columns and so takes b first: TN is the forward pass x W^T (a as it is, b transposed), NN the
// gradient of the input, NT that of the weight.
std::string name_of(const Matmul&);

// A kernel and how to start it. takes(): what it cannot do, it refuses as a whole.
template <class Problem>
struct Rung {
  std::string name, idea;
  std::function<bool(const Problem&)> takes;
  std::function<void(const Problem&, cudaStream_t)> launch;
};
using MatmulRung = Rung<Matmul>;

std::vector<MatmulRung> bf16_ladder();  // bf16_ladder.cpp
MatmulRung cublaslt();                  // library.cpp: the fastest of all that its heuristic offers

// ---- Right? (matmul_check.cu) ----

// Runs the rung on random-normal matrices of this size and compares every element with a sum in
// double precision: |error| <= 1e-5 * sum |a||b|, and half a unit in the last place where the
// result is rounded to bf16. c holds NaN before (for beta: numbers), and bytes around it are
// guarded. Returns an empty string, or a sentence on what is wrong. Pointers of p are ignored.
// shift: elements between an aligned address and the matrices.
std::string complaint_about(const MatmulRung& rung, Matmul p, int64_t shift = 0);

// Sizes that a kernel made for multiples of its tile gets wrong, K = 0, and few tiles that are so
// long along k that stream-K shares them.
std::vector<Shape> odd_sizes();  // {m, n, k}

// A matmul of random-normal matrices that lives as long as this does.
class RandomMatmul {
 public:
  explicit RandomMatmul(const Matmul& shape);
  const Matmul& problem() const { return p_; }

 private:
  Matmul p_;
  Tensor a_, b_, c_;
};

// ---- Fast? (harness.cpp) ----

struct Run {
  std::string name, idea;
  std::function<void(cudaStream_t)> launch;
};
// The median time of one launch of each, in seconds. They run in turns, so that a GPU that grows
// hot or shares its power is as fast for one as for the other. A sample is as many launches in a
// row as take `sample` seconds, at least one.
std::vector<double> time_in_turns(const std::vector<Run>& runs, int rounds = 15,
                                  double sample = 2e-3);

struct Row {
  std::string problem, name, idea;
  double seconds = 0, work = 0;  // work: floating-point operations, or bytes
  double share = 0;              // of the speed of what it is compared with
};
struct Results {
  std::string title, unit;  // "TFLOP/s", "TB/s"
  std::string beside;       // "cuBLASLt", "copy"
  std::vector<Row> rows;
  double speed(const Row& row) const { return row.work / row.seconds * 1e-12; }
};
// Times runs[i] beside the last of them and appends one row for each, the last one included.
void measure(Results& results, const std::string& problem, double work,
             const std::vector<Run>& runs, int rounds = 15);

void print(const Results&);
void save_csv(const Results&, const std::string& path);
void draw(const Results&, const std::string& path);  // speeds, problem by problem, as SVG

}  // namespace lockstep::ladder
