// Softmax cross-entropy on CUDA. The logits are by far the largest tensor of a step (tokens times
// vocabulary), so forward reads them once, one block per row, and keeps only one number of each
// row: lse = log(sum(exp(logits))). Backward reads them once more.

#include "common/kernels_cuda.h"

namespace lockstep::cuda {

// Of one row, by a block; thread 0 has the result.
template <class T, bool Even>
__device__ LogSumExp log_sum_exp(const T* row, int64_t vocab) {
  constexpr int N = kPack<T>;
  LogSumExp total;
  for (int64_t j = int64_t(threadIdx.x) * N; j < vocab; j += int64_t(blockDim.x) * N) {
    Pack<T, N> x = load<Even, N>(row + j, vocab - j);
    float v[N];
    for (int k = 0; k < N; ++k) v[k] = Even || j + k < vocab ? float(x.at[k]) : -INFINITY;
    total.add(v);
  }
  total.join_block();
  return total;
}

template <class T, bool Even>
__global__ void row_loss_kernel(float* row_loss, float* lse, const T* logits,
                                const int32_t* targets, int64_t vocab) {
  int64_t t = blockIdx.x;
  const T* row = logits + t * vocab;
  LogSumExp total = log_sum_exp<T, Even>(row, vocab);
  if (threadIdx.x > 0) return;
  lse[t] = total.value();
  int64_t target = targets[t];
  // A target beyond the vocabulary has no loss; NaN stops the run before it changes a weight.
  float of_target = target < vocab ? float(row[max(target, int64_t(0))]) : NAN;
  row_loss[t] = target < 0 ? 0 : lse[t] - of_target;
}

__global__ void __launch_bounds__(1024)
    total_loss_kernel(float* loss, const float* row_loss, const float* scale, int64_t rows) {
  float sum = 0;
  for (int64_t t = threadIdx.x; t < rows; t += blockDim.x) sum += row_loss[t];
  sum = block_sum(sum);
  if (threadIdx.x == 0) loss[0] = scale[0] * sum;
}

static void cross_entropy(const Tensor& loss, const Tensor& lse, const Tensor& logits,
                          const Tensor& targets, const Tensor& scale) {
  int64_t rows = logits.dim(0), vocab = logits.dim(1);
  expect("logits", logits, rows * vocab, logits.dtype());
  expect("targets", targets, rows, DType::I32);
  expect("lse", lse, rows, DType::F32);
  expect("loss", loss, 1, DType::F32);
  expect("scale", scale, 1, DType::F32);
  require(vocab > 0, "a cross-entropy over no classes");
  Tensor row_loss = Tensor::empty({rows}, DType::F32, Device::CUDA, Category::Buffers);
  for_type(logits.dtype(), [&](auto zero) {
    using T = decltype(zero);
    int threads = round_to_warps(std::min<int64_t>(ceil_div(vocab, kPack<T>), 512));
    branch(is_even(kPack<T>, vocab, logits), [&](auto even) {
      launch(row_loss_kernel<T, even()>, {rows, 1, threads}, as<float>(row_loss), as<float>(lse),
             as<T>(logits), as<int32_t>(targets), vocab);
    });
  });
  launch(total_loss_kernel, {1, 1, 1024}, as<float>(loss), as<float>(row_loss), as<float>(scale),
         rows);
}

// d loss / d logit_j = softmax_j - [j is the target], times what a token counts.
template <class T, bool Even>
__global__ void cross_entropy_backward_kernel(T* d_logits, const float* d_loss, const T* logits,
                                              const float* lse, const int32_t* targets,
                                              const float* scale, int64_t vocab, int64_t first) {
  constexpr int N = kPack<T>;
  int64_t j = column<N>(), t = blockIdx.x, target = targets[t];
  if (j >= vocab) return;
  Pack<T, N> x{};
  if (target >= 0) {
    float weight = d_loss[0] * scale[0], l = lse[t];
    x = load<Even, N>(logits + t * vocab + j, vocab - j);
    for (int k = 0; k < N; ++k) {
      float softmax = quick_exp(float(x.at[k]) - l);
      x.at[k] = rounded<T>(weight * (softmax - (first + j + k == target ? 1.0f : 0.0f)));
    }
  }
  store<Even>(d_logits + t * vocab + j, vocab - j, x);
}

static void cross_entropy_backward(const Tensor& d_logits, const Tensor& d_loss,
                                   const Tensor& logits, const Tensor& lse, const Tensor& targets,
                                   const Tensor& scale, int64_t first) {
  int64_t rows = logits.dim(0), vocab = logits.dim(1);
  expect("logits", logits, rows * vocab, logits.dtype());
  expect("d_logits", d_logits, rows * vocab, logits.dtype());
  expect("targets", targets, rows, DType::I32);
  expect("lse", lse, rows, DType::F32);
  expect("d_loss", d_loss, 1, DType::F32);
  expect("scale", scale, 1, DType::F32);
  for_type(logits.dtype(), [&](auto zero) {
    using T = decltype(zero);
    branch(is_even(kPack<T>, vocab, d_logits, logits), [&](auto even) {
      launch(cross_entropy_backward_kernel<T, even()>, row_grid(rows, vocab, kPack<T>),
             as<T>(d_logits), as<float>(d_loss), as<T>(logits), as<float>(lse),
             as<int32_t>(targets), as<float>(scale), vocab, first);
    });
  });
}

template <class T, bool Even>
__global__ void vocab_statistics_kernel(float* statistics, const T* logits, const int32_t* targets,
                                        int64_t columns, int64_t first) {
  int64_t t = blockIdx.x, rows = gridDim.x, target = targets[t] - first;
  const T* row = logits + t * columns;
  LogSumExp total = log_sum_exp<T, Even>(row, columns);
  if (threadIdx.x > 0) return;
  statistics[t] = total.value();
  statistics[rows + t] = target >= 0 && target < columns ? float(row[target]) : 0.0f;
}

static void vocab_statistics(const Tensor& statistics, const Tensor& logits, const Tensor& targets,
                             int64_t first) {
  int64_t rows = logits.dim(0), columns = logits.dim(1);
  expect("statistics", statistics, 2 * rows, DType::F32);
  expect("logits", logits, rows * columns, logits.dtype());
  expect("targets", targets, rows, DType::I32);
  for_type(logits.dtype(), [&](auto zero) {
    using T = decltype(zero);
    int threads = round_to_warps(std::min<int64_t>(ceil_div(columns, kPack<T>), 512));
    branch(is_even(kPack<T>, columns, logits), [&](auto even) {
      launch(vocab_statistics_kernel<T, even()>, {rows, 1, threads}, as<float>(statistics),
             as<T>(logits), as<int32_t>(targets), columns, first);
    });
  });
}

__global__ void join_statistics_kernel(float* row_loss, float* lse, const float* all,
                                       const int32_t* targets, int64_t rows, int ranks) {
  int64_t t = flat_index();
  if (t >= rows) return;
  float largest = -INFINITY, sum = 0, of_target = 0;
  for (int r = 0; r < ranks; ++r) largest = fmaxf(largest, all[2 * r * rows + t]);
  for (int r = 0; r < ranks; ++r) {
    sum += expf(all[2 * r * rows + t] - largest);
    of_target += all[(2 * r + 1) * rows + t];
  }
  lse[t] = largest + logf(sum);
  row_loss[t] = targets[t] < 0 ? 0 : lse[t] - of_target;
}

static void vocab_cross_entropy(const Tensor& loss, const Tensor& lse, const Tensor& all,
                                const Tensor& targets, const Tensor& scale) {
  int64_t ranks = all.dim(0), rows = all.dim(2);
  expect("all", all, 2 * ranks * rows, DType::F32);
  expect("targets", targets, rows, DType::I32);
  expect("lse", lse, rows, DType::F32);
  expect("loss", loss, 1, DType::F32);
  expect("scale", scale, 1, DType::F32);
  Tensor row_loss = Tensor::empty({rows}, DType::F32, Device::CUDA, Category::Buffers);
  launch(join_statistics_kernel, flat_grid(rows, 1), as<float>(row_loss), as<float>(lse),
         as<float>(all), as<int32_t>(targets), rows, int(ranks));
  launch(total_loss_kernel, {1, 1, 1024}, as<float>(loss), as<float>(row_loss), as<float>(scale),
         rows);
}

void add_loss(Kernels& k) {
  k.vocab_statistics = vocab_statistics;
  k.vocab_cross_entropy = vocab_cross_entropy;
  k.cross_entropy = cross_entropy;
  k.cross_entropy_backward = cross_entropy_backward;
}

}  // namespace lockstep::cuda
