// The optimizer on CUDA. The gradient norm, the clip factor and the learning rate never leave the
// GPU: see step_state.h.

#include "common/kernels_cuda.h"

namespace lockstep::cuda {

// ---- The norm of all gradients ----
//
//     tensors     0 ├──────────────────┤   1 ├──┤   2 ├────────┤
//     blocks          0     1     2           3         4    5       first_block = 0 3 4 6
//     partial         ■     ■     ■           ■         ■    ■
//     sums                  ■                 ■            ■         a block for each tensor
//
// One launch for many tensors: which ones, it is told in its arguments, of which 4 KB fit.

struct Pieces {
  static constexpr int kMost = 128, kThreads = 256;
  static constexpr int64_t kBlock = 16384;  // elements
  const void* at[kMost];
  int64_t size[kMost];
  int first_block[kMost + 1];
  int count = 0;
};

// Squares in fp64: a gradient that is finite in bf16 has a square that overflows fp32, and the sum
// over all parameters should not depend on how they are cut into tensors.
template <class T, bool Even>
__device__ static double squares_of(const T* x, int64_t n) {
  constexpr int N = kPack<T>;
  double sum = 0;
#pragma unroll 4
  for (int64_t i = int64_t(threadIdx.x) * N; i < n; i += Pieces::kThreads * N) {
    Pack<T, N> pack = load<Even, N>(x + i, n - i);
    for (int k = 0; k < N; ++k) sum += double(float(pack.at[k])) * double(float(pack.at[k]));
  }
  return sum;
}

template <class T>
__global__ void partial_squares_kernel(double* partial, const __grid_constant__ Pieces pieces) {
  int t = 0;
  while (int(blockIdx.x) >= pieces.first_block[t + 1]) ++t;
  int64_t first = (int64_t(blockIdx.x) - pieces.first_block[t]) * Pieces::kBlock;
  const T* x = static_cast<const T*>(pieces.at[t]) + first;
  int64_t n = min(pieces.size[t] - first, Pieces::kBlock);
  bool even = n % kPack<T> == 0 && reinterpret_cast<uintptr_t>(x) % 16 == 0;
  double sum = block_sum(even ? squares_of<T, true>(x, n) : squares_of<T, false>(x, n));
  if (threadIdx.x == 0) partial[blockIdx.x] = sum;
}

__device__ static double total(const double* parts, int64_t n) {
  double sum = 0;
  for (int64_t i = threadIdx.x; i < n; i += blockDim.x) sum += parts[i];
  return block_sum(sum);
}

__global__ void total_squares_kernel(double* sums, const double* partial,
                                     const __grid_constant__ Pieces pieces) {
  int first = pieces.first_block[blockIdx.x], behind = pieces.first_block[blockIdx.x + 1];
  double all = total(partial + first, behind - first);
  if (threadIdx.x == 0) sums[blockIdx.x] = all;
}

// From tensor `first` on, as many as one launch takes; returns how many.
template <class T>
static int64_t sum_some_squares(const Tensor& sums, const std::vector<Tensor>& all, int64_t first) {
  Pieces pieces;
  pieces.first_block[0] = 0;
  for (size_t i = size_t(first); i < all.size() && pieces.count < Pieces::kMost; ++i) {
    int64_t n = all[i].defined() ? all[i].size() : 0;
    if (n > 0 && all[i].dtype() != dtype_of<T>) break;
    if (n > 0) expect("a gradient", all[i], n, dtype_of<T>);
    int t = pieces.count++;
    pieces.at[t] = n > 0 ? all[i].raw() : nullptr;
    pieces.size[t] = n;
    pieces.first_block[t + 1] = pieces.first_block[t] + int(ceil_div(n, Pieces::kBlock));
  }
  int64_t blocks = pieces.first_block[pieces.count];
  Tensor partial = Tensor::empty({blocks}, DType::F64, Device::CUDA, Category::Buffers);
  launch(partial_squares_kernel<T>, {blocks, 1, Pieces::kThreads}, as<double>(partial), pieces);
  launch(total_squares_kernel, {pieces.count, 1, 256}, as<double>(sums) + first,
         as<double>(partial), pieces);
  return pieces.count;
}

static void sum_squares(const Tensor& sums, const std::vector<Tensor>& all) {
  expect("sums", sums, int64_t(all.size()), DType::F64);
  for (int64_t done = 0; done < int64_t(all.size());) {
    const Tensor& next = all[size_t(done)];
    for_type(next.defined() ? next.dtype() : DType::F32,
             [&](auto zero) { done += sum_some_squares<decltype(zero)>(sums, all, done); });
  }
}

// ---- The step ----

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
  int64_t i = flat_index() * N, left = n - i;
  if (i >= n) return;
  Pack<G, N> g = load<Even, N>(grad + i, left);
  Pack<float, N> w = load<Even, N>(master + i, left);
  Pack<float, N> first = load<Even, N>(m + i, left), second = load<Even, N>(v + i, left);
  const StepState s = *state;  // on its way together with the others
  if (s.skip) return;
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
