// The optimizer on CUDA. The gradient norm, the clip factor and the learning rate never leave the
// GPU: see step_state.h.

#include "common/kernels_cuda.h"

namespace lockstep::cuda {

// Squares in fp64: a gradient that is finite in bf16 has a square that overflows fp32, and the sum
// over all parameters should not depend on how they are cut into tensors.
template <class T, bool Even>
__global__ void partial_squares_kernel(double* partial, const T* x, int64_t n) {
  constexpr int N = kPack<T>;
  int64_t stride = int64_t(gridDim.x) * blockDim.x * N;
  double sum = 0;
#pragma unroll 4
  for (int64_t i = flat_index() * N; i < n; i += stride) {
    Pack<T, N> pack = load<Even, N>(x + i, n - i);
    for (int k = 0; k < N; ++k) sum += double(float(pack.at[k])) * double(float(pack.at[k]));
  }
  sum = block_sum(sum);
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__device__ static double total(const double* parts, int64_t n) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) sum += parts[i];
  return block_sum(sum);
}

__global__ void total_kernel(double* sum, const double* parts, int64_t n) {
  double all = total(parts, n);
  if (threadIdx.x == 0) sum[0] = all;
}

static void sum_squares(const Tensor& sum, const Tensor& x) {
  int64_t n = x.size();
  expect("sum", sum, 1, DType::F64);
  expect("x", x, n, x.dtype());
  for_type(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    Grid grid = flat_grid(n, kPack<T>);
    grid.x = std::min<int64_t>(grid.x, 1024);  // the same on every GPU, and so is the sum
    Tensor partial = Tensor::empty({grid.x}, DType::F64, Device::CUDA, Category::Buffers);
    branch(is_even(kPack<T>, n, x), [&](auto even) {
      launch(partial_squares_kernel<T, even()>, grid, as<double>(partial), as<T>(x), n);
    });
    launch(total_kernel, {1, 1, 256}, as<double>(sum), as<double>(partial), grid.x);
  });
}

static StepState* state_of(const Tensor& state) {
  expect("the state of a step", state, sizeof(StepState), DType::U8);
  return as<StepState>(state);
}

__global__ void begin_step_kernel(StepState* state, float* scale, const int64_t* valid) {
  state->loss = 0;
  state->valid_tokens = valid[0];
  scale[0] = valid[0] > 0 ? float(1.0 / double(valid[0])) : 0.0f;
}

static void begin_step(const Tensor& state, const Tensor& scale, const Tensor& valid) {
  expect("scale", scale, 1, DType::F32);
  expect("valid", valid, 1, DType::I64);
  launch(begin_step_kernel, {1, 1, 1}, state_of(state), as<float>(scale), as<int64_t>(valid));
}

__global__ void add_loss_kernel(StepState* state, const float* loss) {
  state->loss += double(loss[0]);
}

static void add_step_loss(const Tensor& state, const Tensor& loss) {
  expect("loss", loss, 1, DType::F32);
  launch(add_loss_kernel, {1, 1, 1}, state_of(state), as<float>(loss));
}

__global__ void local_sums_kernel(double* sums, const StepState* state, const double* squares,
                                  int64_t n) {
  double norm_squared = total(squares, n);
  if (threadIdx.x > 0) return;
  sums[0] = state->loss;
  sums[1] = norm_squared;
}

static void local_sums(const Tensor& sums, const Tensor& state, const Tensor& squares) {
  expect("sums", sums, 2, DType::F64);
  expect("squares", squares, squares.size(), DType::F64);
  launch(local_sums_kernel, {1, 1, 256}, as<double>(sums), state_of(state), as<double>(squares),
         squares.size());
}

__global__ void begin_update_kernel(StepState* state, const double* sums, UpdateRule rule) {
  state->loss = sums[0];
  begin_update(*state, sums[1], rule);
}

static void begin_step_update(const Tensor& state, const Tensor& sums, const UpdateRule& rule) {
  expect("sums", sums, 2, DType::F64);
  launch(begin_update_kernel, {1, 1, 1}, state_of(state), as<double>(sums), rule);
}

// Moves 30 bytes for each element (bf16 weights, fp32 gradients), which is all of its time.
// value is null where the master weights are the weights.
template <class V, class G, bool Even>
__global__ void adamw_kernel(V* value, float* master, float* m, float* v, const G* grad,
                             const StepState* state, UpdateRule rule, float decay, int64_t n) {
  constexpr int N = 4;
  const StepState s = *state;
  int64_t i = flat_index() * N, left = n - i;
  if (s.skip || i >= n) return;
  Pack<G, N> g = load<Even, N>(grad + i, left);
  Pack<float, N> w = load<Even, N>(master + i, left);
  Pack<float, N> first = load<Even, N>(m + i, left), second = load<Even, N>(v + i, left);
  for (int k = 0; k < N; ++k)
    adamw_element<float>(w.at[k], first.at[k], second.at[k], float(g.at[k]), decay, s, rule);
  store<Even>(master + i, left, w);
  store<Even>(m + i, left, first);
  store<Even>(v + i, left, second);
  if (!value) return;
  Pack<V, N> narrow;
  for (int k = 0; k < N; ++k) narrow.at[k] = rounded<V>(w.at[k]);
  store<Even>(value + i, left, narrow);
}

static void adamw(const Tensor& value, const Tensor& master, const Tensor& m, const Tensor& v,
                  const Tensor& grad, const Tensor& state, const UpdateRule& rule, bool decay) {
  int64_t n = master.size();
  expect("master", master, n, DType::F32);
  expect("m", m, n, DType::F32);
  expect("v", v, n, DType::F32);
  expect("value", value, n, value.dtype());
  expect("grad", grad, n, grad.dtype());
  for_type(value.dtype(), [&](auto value_zero) {
    using V = decltype(value_zero);
    for_type(grad.dtype(), [&](auto grad_zero) {
      using G = decltype(grad_zero);
      branch(is_even(4, n, value, master, m, v, grad), [&](auto even) {
        launch(adamw_kernel<V, G, even()>, flat_grid(n, 4),
               value.raw() == master.raw() ? nullptr : as<V>(value), as<float>(master),
               as<float>(m), as<float>(v), as<G>(grad), state_of(state), rule,
               decay ? rule.weight_decay : 0.0f, n);
      });
    });
  });
}

void add_optimizer(Kernels& k) {
  k.sum_squares = sum_squares;
  k.begin_step = begin_step;
  k.add_loss = add_step_loss;
  k.local_sums = local_sums;
  k.begin_update = begin_step_update;
  k.adamw = adamw;
}

}  // namespace lockstep::cuda
