// Cross-entropy, AdamW and the norm of a gradient, one kernel for each operation. See plain.h.

#include "08_kernels/each.h"
#include "08_kernels/plain.h"

namespace lockstep::plain {

using cuda::as;
using cuda::rounded;

template <class T>
__global__ void row_max_kernel(float* largest, const T* logits, int64_t vocab) {
  float found = -FLT_MAX;
  for (int64_t j = threadIdx.x; j < vocab; j += blockDim.x)
    found = fmaxf(found, float(logits[blockIdx.x * vocab + j]));
  found = cuda::block_max(found);
  if (threadIdx.x == 0) largest[blockIdx.x] = found;
}

// Subtracts each row's largest, writes the exponentials, reads them for their sum: the logits or
// something of their size travel five times.
template <class T>
void cross_entropy_steps(const Tensor& loss, const Tensor& lse, const Tensor& logits,
                         const Tensor& targets, const Tensor& scale) {
  int64_t rows = logits.dim(0), vocab = logits.dim(1), n = rows * vocab;
  Tensor exponentials = logits.like(), row_loss = lse.like(), sums = lse.like();
  const T* x = as<T>(logits);
  T* e = as<T>(exponentials);
  float *l = as<float>(lse), *row = as<float>(row_loss), *sum = as<float>(sums);
  const int32_t* target = as<int32_t>(targets);
  cuda::launch(row_max_kernel<T>, {rows, 1, 256}, l, x, vocab);
  each(n, [=] __device__(int64_t i) { e[i] = rounded<T>(expf(float(x[i]) - l[i / vocab])); });
  row_sums(sum, rows, vocab,
           [=] __device__(int64_t t, int64_t j) { return float(e[t * vocab + j]); });
  each(rows, [=] __device__(int64_t t) {
    l[t] += logf(sum[t]);
    row[t] = target[t] < 0 ? 0 : l[t] - float(x[t * vocab + target[t]]);
  });
  row_sums(as<float>(loss), 1, rows, [=] __device__(int64_t, int64_t t) { return row[t]; });
  float *total = as<float>(loss), *factor = as<float>(scale);
  each(1, [=] __device__(int64_t) { total[0] *= factor[0]; });
}

void cross_entropy(const Tensor& loss, const Tensor& lse, const Tensor& logits,
                   const Tensor& targets, const Tensor& scale) {
  cuda::for_type(logits.dtype(), [&](auto zero) {
    cross_entropy_steps<decltype(zero)>(loss, lse, logits, targets, scale);
  });
}

template <class V, class G>
void adamw_steps(const Tensor& value, const Tensor& master, const Tensor& m, const Tensor& v,
                 const Tensor& grad, const Tensor& state, const UpdateRule& rule, bool decay) {
  int64_t n = master.size();
  Tensor clipped = master.like(), steps = master.like();
  const StepState* s = as<StepState>(state);
  const G* from = as<G>(grad);
  float *g = as<float>(clipped), *step = as<float>(steps), *w = as<float>(master);
  float *first = as<float>(m), *second = as<float>(v);
  each(n, [=] __device__(int64_t i) { g[i] = float(from[i]) * s->clip; });
  each(n,
       [=] __device__(int64_t i) { first[i] = rule.beta1 * first[i] + (1 - rule.beta1) * g[i]; });
  each(n, [=] __device__(int64_t i) {
    second[i] = rule.beta2 * second[i] + (1 - rule.beta2) * g[i] * g[i];
  });
  each(n, [=] __device__(int64_t i) { step[i] = sqrtf(second[i] / s->bias2) + rule.epsilon; });
  each(n, [=] __device__(int64_t i) { step[i] = first[i] / s->bias1 / step[i]; });
  if (decay)
    each(n, [=] __device__(int64_t i) { w[i] -= s->learning_rate * rule.weight_decay * w[i]; });
  each(n, [=] __device__(int64_t i) { w[i] -= s->learning_rate * step[i]; });
  V* narrow = as<V>(value);
  if (value.raw() != master.raw())
    each(n, [=] __device__(int64_t i) { narrow[i] = rounded<V>(w[i]); });
}

void adamw(const Tensor& value, const Tensor& master, const Tensor& m, const Tensor& v,
           const Tensor& grad, const Tensor& state, const UpdateRule& rule, bool decay) {
  cuda::for_type(value.dtype(), [&](auto of_value) {
    cuda::for_type(grad.dtype(), [&](auto of_grad) {
      adamw_steps<decltype(of_value), decltype(of_grad)>(value, master, m, v, grad, state, rule,
                                                         decay);
    });
  });
}

template <class T>
void sum_squares_steps(const Tensor& sum, const Tensor& x) {
  constexpr int64_t kPart = 4096;  // elements that one block adds up
  int64_t n = x.size(), parts = cuda::ceil_div(n, kPart);
  Tensor squares = Tensor::empty({n}, DType::F32, Device::CUDA);
  Tensor partial = Tensor::empty({parts}, DType::F64, Device::CUDA);
  const T* in = as<T>(x);
  float* square = as<float>(squares);
  double* part = as<double>(partial);
  each(n, [=] __device__(int64_t i) { square[i] = float(in[i]) * float(in[i]); });
  row_sums(part, parts, kPart, [=] __device__(int64_t row, int64_t j) {
    return row * kPart + j < n ? double(square[row * kPart + j]) : 0.0;
  });
  row_sums(as<double>(sum), 1, parts, [=] __device__(int64_t, int64_t j) { return part[j]; });
}

void sum_squares(const Tensor& sum, const Tensor& x) {
  cuda::for_type(x.dtype(), [&](auto zero) { sum_squares_steps<decltype(zero)>(sum, x); });
}

}  // namespace lockstep::plain
