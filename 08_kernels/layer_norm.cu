// LayerNorm as six kernels, and as one with a block for each row. Between the passes over a row the
// fused one finds it in the caches: from memory it travels once.
//
//     separate   [mean] [x - mean] [variance] [/ deviation] [* gain] [+ bias]    10 tensors moved
//     fused      [                        LayerNorm                         ]     2 tensors moved

#include "08_kernels/basics.h"
#include "08_kernels/each.h"

namespace lockstep::basics {

void layer_norm_separate(const Tensor& y, const Tensor& x, const Tensor& gain, const Tensor& bias) {
  int64_t rows = x.dim(0), width = x.dim(1), n = x.size();
  Tensor sums = Tensor::empty({rows}, DType::F32, Device::CUDA), squares = sums.like();
  const float *in = x.data<float>(), *g = gain.data<float>(), *b = bias.data<float>();
  float *out = y.data<float>(), *sum = sums.data<float>(), *square = squares.data<float>();
  row_sums(sum, rows, width,
           [=] __device__(int64_t row, int64_t j) { return in[row * width + j]; });
  each(n, [=] __device__(int64_t i) { out[i] = in[i] - sum[i / width] / float(width); });
  row_sums(square, rows, width, [=] __device__(int64_t row, int64_t j) {
    return out[row * width + j] * out[row * width + j];
  });
  each(n, [=] __device__(int64_t i) {
    out[i] /= sqrtf(square[i / width] / float(width) + kLayerNormEpsilon);
  });
  each(n, [=] __device__(int64_t i) { out[i] *= g[i % width]; });
  each(n, [=] __device__(int64_t i) { out[i] += b[i % width]; });
}

static __global__ void layer_norm_kernel(float* y, const float* x, const float* gain,
                                         const float* bias, int64_t width) {
  const float* row = x + blockIdx.x * width;
  float sum = 0, squares = 0;
  for (int64_t j = threadIdx.x; j < width; j += blockDim.x) sum += row[j];
  float mean = cuda::block_sum(sum) / float(width);
  for (int64_t j = threadIdx.x; j < width; j += blockDim.x)
    squares += (row[j] - mean) * (row[j] - mean);
  float scale = 1 / sqrtf(cuda::block_sum(squares) / float(width) + kLayerNormEpsilon);
  for (int64_t j = threadIdx.x; j < width; j += blockDim.x)
    y[blockIdx.x * width + j] = (row[j] - mean) * scale * gain[j] + bias[j];
}

void layer_norm_fused(const Tensor& y, const Tensor& x, const Tensor& gain, const Tensor& bias) {
  cuda::launch(layer_norm_kernel, {x.dim(0), 1, 512}, y.data<float>(),
               static_cast<const float*>(x.data<float>()),
               static_cast<const float*>(gain.data<float>()),
               static_cast<const float*>(bias.data<float>()), x.dim(1));
}

}  // namespace lockstep::basics
