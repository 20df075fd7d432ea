// Plain attention on CUDA. For each query head, all sequences at once:
//   S = Q K^T;  P = softmax(S / sqrt(d)), causal;  O = P V
//   dV += P^T dO;  dP = dO V^T;  dS = P (dP - rowsum(P dP)) / sqrt(d);  dQ = dS K;  dK += dS^T Q
// P is as large as length^2 for every head and is written, read and kept: its memory, not the
// arithmetic, is what plain attention costs. The products also compute the half of S that the
// mask throws away.

#include "common/kernels_cuda.h"

namespace lockstep::cuda {

// One matrix of each sequence, inside a larger tensor; distances in elements.
struct Slices {
  std::byte* first;
  int64_t row_stride, sequence_stride;
};

static Slices slices(const Tensor& t, int64_t first, int64_t row_stride, int64_t sequence_stride) {
  return {t.raw() + first * int64_t(size_of(t.dtype())), row_stride, sequence_stride};
}

// Where the matrices of query head h lie.
struct Head {
  const AttentionShape& s;
  int64_t h;
  int64_t kv() const { return h / (s.heads / s.kv_heads); }
  bool first_of_group() const { return h % (s.heads / s.kv_heads) == 0; }
  Slices in_qkv(const Tensor& t, int64_t head) const {
    return slices(t, head * s.head_dim, s.columns(), s.length * s.columns());
  }
  Slices q(const Tensor& t) const { return in_qkv(t, h); }
  Slices k(const Tensor& t) const { return in_qkv(t, s.heads + kv()); }
  Slices v(const Tensor& t) const { return in_qkv(t, s.heads + s.kv_heads + kv()); }
  Slices out(const Tensor& t) const {
    int64_t width = s.heads * s.head_dim;
    return slices(t, h * s.head_dim, width, s.length * width);
  }
  Slices probs(const Tensor& t) const {
    int64_t square = s.length * s.length;
    return slices(t, h * square, s.length, s.heads * square);
  }
};

// c [m, n] = op(a) op(b) + beta c for each sequence. Row-major: b goes first, see
// kernels_cuda_matmul.cu.
struct Batch {
  DType type;
  int64_t sequences;
  void product(Slices c, Slices a, Op ta, Slices b, Op tb, int64_t m, int64_t n, int64_t k,
               float beta) const {
    float one = 1;
    cudaDataType_t t = blas_type(type);
    check(cublasGemmStridedBatchedEx(blas().handle, blas_op(tb), blas_op(ta), int(n), int(m),
                                     int(k), &one, b.first, t, int(b.row_stride), b.sequence_stride,
                                     a.first, t, int(a.row_stride), a.sequence_stride, &beta,
                                     c.first, t, int(c.row_stride), c.sequence_stride,
                                     int(sequences), CUBLAS_COMPUTE_32F, CUBLAS_GEMM_DEFAULT));
  }
};

// One block per row of scores: row i of a [length, length] matrix sees columns 0 to i.
template <class T, bool Even>
__global__ void causal_softmax_kernel(T* scores, int64_t length, float scale) {
  constexpr int N = kPack<T>;
  T* row = scores + blockIdx.x * length;
  int64_t seen = blockIdx.x % length + 1;
  LogSumExp total;
  for (int64_t j = int64_t(threadIdx.x) * N; j < seen; j += int64_t(blockDim.x) * N) {
    Pack<T, N> s = load<Even, N>(row + j, length - j);
    float v[N];
    for (int k = 0; k < N; ++k) v[k] = j + k < seen ? scale * float(s.at[k]) : -INFINITY;
    total.add(v);
  }
  total.join_block();
  float inverse = 1 / total.sum;
  for (int64_t j = int64_t(threadIdx.x) * N; j < length; j += int64_t(blockDim.x) * N) {
    Pack<T, N> p{};
    if (j < seen) p = load<Even, N>(row + j, length - j);
    for (int k = 0; k < N; ++k) {
      float e = j + k < seen ? __expf(scale * float(p.at[k]) - total.largest) : 0;
      p.at[k] = rounded<T>(e * inverse);
    }
    store<Even>(row + j, length - j, p);
  }
}

// In place, for one head: d [sequences, length, length] holds dP and becomes dS. The rows of this
// head's probs lie `sequence_stride` apart from one sequence to the next.
template <class T, bool Even>
__global__ void causal_softmax_backward_kernel(T* d, const T* probs, int64_t sequence_stride,
                                               int64_t length, float scale) {
  constexpr int N = kPack<T>;
  int64_t i = blockIdx.x, sequence = blockIdx.y;
  T* d_row = d + (sequence * length + i) * length;
  const T* p_row = probs + sequence * sequence_stride + i * length;
  float dot = 0;
  for (int64_t j = int64_t(threadIdx.x) * N; j <= i; j += int64_t(blockDim.x) * N) {
    Pack<T, N> p = load<Even, N>(p_row + j, length - j), g = load<Even, N>(d_row + j, length - j);
    for (int k = 0; k < N; ++k)
      if (j + k <= i) dot += float(p.at[k]) * float(g.at[k]);
  }
  dot = block_sum(dot);
  for (int64_t j = int64_t(threadIdx.x) * N; j < length; j += int64_t(blockDim.x) * N) {
    Pack<T, N> p{}, g{};
    if (j <= i) p = load<Even, N>(p_row + j, length - j), g = load<Even, N>(d_row + j, length - j);
    for (int k = 0; k < N; ++k) {
      float value = j + k <= i ? scale * float(p.at[k]) * (float(g.at[k]) - dot) : 0;
      g.at[k] = rounded<T>(value);
    }
    store<Even>(d_row + j, length - j, g);
  }
}

static void expect_attention(const Tensor& out, const Tensor& probs, const Tensor& qkv,
                             const AttentionShape& s) {
  require(s.kv_heads > 0 && s.heads % s.kv_heads == 0 && s.head_dim > 0, s.heads,
          " query heads of ", s.head_dim, " elements cannot share ", s.kv_heads, " key heads");
  require(s.columns() <= INT32_MAX && s.length <= INT32_MAX, "attention over ", s.length,
          " rows of ", s.columns(), " elements is larger than cuBLAS can address");
  int64_t rows = s.sequences * s.length;
  expect("qkv", qkv, rows * s.columns(), qkv.dtype());
  expect("out", out, rows * s.heads * s.head_dim, qkv.dtype());
  expect("probs", probs, rows * s.heads * s.length, qkv.dtype());
}

static int softmax_threads(int64_t length, int N) {
  return round_to_warps(std::min<int64_t>(ceil_div(length, N), 256));
}
static float score_scale(const AttentionShape& s) { return 1 / sqrtf(float(s.head_dim)); }

static void attention(const Tensor& out, const Tensor& probs, const Tensor& qkv,
                      const AttentionShape& s) {
  expect_attention(out, probs, qkv, s);
  for_type(qkv.dtype(), [&](auto zero) {
    using T = decltype(zero);
    constexpr int N = kPack<T>;
    if (probs.size() == 0) return;
    Batch batch{qkv.dtype(), s.sequences};
    int64_t n = s.length, d = s.head_dim;
    for (int64_t h = 0; h < s.heads; ++h) {
      Head head{s, h};
      batch.product(head.probs(probs), head.q(qkv), Op::N, head.k(qkv), Op::T, n, n, d, 0);
    }
    branch(is_even(N, n, probs), [&](auto even) {
      launch(causal_softmax_kernel<T, even()>,
             {s.sequences * s.heads * n, 1, softmax_threads(n, N)}, as<T>(probs), n,
             score_scale(s));
    });
    for (int64_t h = 0; h < s.heads; ++h) {
      Head head{s, h};
      batch.product(head.out(out), head.probs(probs), Op::N, head.v(qkv), Op::N, n, d, n, 0);
    }
  });
}

static void attention_backward(const Tensor& d_qkv, const Tensor& d_out, const Tensor& probs,
                               const Tensor& qkv, const AttentionShape& s) {
  expect_attention(d_out, probs, qkv, s);
  expect("d_qkv", d_qkv, qkv.size(), qkv.dtype());
  for_type(qkv.dtype(), [&](auto zero) {
    using T = decltype(zero);
    constexpr int N = kPack<T>;
    if (probs.size() == 0) return;
    Batch batch{qkv.dtype(), s.sequences};
    int64_t n = s.length, d = s.head_dim;
    // One head at a time, so that dP needs only one head's memory.
    Tensor temp = Tensor::empty({s.sequences, n, n}, qkv.dtype(), Device::CUDA, Category::Buffers);
    Slices dp = slices(temp, 0, n, n * n);
    bool is_aligned = is_even(N, n, temp, probs);
    for (int64_t h = 0; h < s.heads; ++h) {
      Head head{s, h};
      float beta = head.first_of_group() ? 0.0f : 1.0f;  // query heads share keys and values
      Slices d_o = head.out(d_out), p = head.probs(probs);
      batch.product(head.v(d_qkv), p, Op::T, d_o, Op::N, n, d, n, beta);
      batch.product(dp, d_o, Op::N, head.v(qkv), Op::T, n, n, d, 0);
      branch(is_aligned, [&](auto even) {
        launch(causal_softmax_backward_kernel<T, even()>, {n, s.sequences, softmax_threads(n, N)},
               as<T>(temp), reinterpret_cast<const T*>(p.first), p.sequence_stride, n,
               score_scale(s));
      });
      batch.product(head.q(d_qkv), dp, Op::N, head.k(qkv), Op::N, n, d, n, 0);
      batch.product(head.k(d_qkv), dp, Op::T, head.q(qkv), Op::N, n, d, n, beta);
    }
  });
}

void add_attention(Kernels& k) {
  k.attention = attention;
  k.attention_backward = attention_backward;
}

}  // namespace lockstep::cuda
