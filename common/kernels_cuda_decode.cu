// Attention for generation, on CUDA. A new row reads the keys and values of all rows before it, a
// few operations for every byte: memory is what it waits for, and tensor cores would not help.
//
//   a block    one query row and head
//   a warp     every eighth key: score, running softmax, weighted sum of the values
//   a lane     every 32nd element of the head
//
// Each warp keeps the largest score it has met, and shrinks its sums when a larger one comes
// (Milakov and Gimelshein 2018, algorithm 3), so no score is ever written to memory. At the end
// the warps' sums are brought to the largest score of all and added.

#include "common/kernels_cuda.h"

namespace lockstep::cuda {

static constexpr int kWarps = 8;

struct CachedShape {
  int64_t columns, heads, group, head_dim, kv_width, past;
  float scale;
};

// Parts: elements of a head that each lane holds, for heads of up to 32 * Parts.
template <class T, int Parts>
__global__ void attention_cached_kernel(T* out, const T* keys, const T* values, const T* qkv,
                                        CachedShape s) {
  int64_t row = blockIdx.x, head = blockIdx.y;
  int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
  const T* q_row = qkv + row * s.columns + head * s.head_dim;
  const T* k_head = keys + head / s.group * s.head_dim;
  const T* v_head = values + head / s.group * s.head_dim;

  float q[Parts], sums[Parts] = {}, largest = -FLT_MAX, total = 0;
  auto inside = [&](int part) { return lane + 32 * part < s.head_dim; };
#pragma unroll
  for (int i = 0; i < Parts; ++i) q[i] = inside(i) ? s.scale * float(q_row[lane + 32 * i]) : 0;

  for (int64_t j = warp; j <= s.past + row; j += kWarps) {
    const T *k = k_head + j * s.kv_width, *v = v_head + j * s.kv_width;
    float score = 0;
#pragma unroll
    for (int i = 0; i < Parts; ++i)
      if (inside(i)) score += q[i] * float(k[lane + 32 * i]);
    for (int step = 16; step > 0; step /= 2) score += __shfl_xor_sync(0xffffffffu, score, step);
    float before = largest;
    largest = fmaxf(before, score);
    float shrink = __expf(before - largest), weight = __expf(score - largest);
    total = total * shrink + weight;
#pragma unroll
    for (int i = 0; i < Parts; ++i)
      if (inside(i)) sums[i] = sums[i] * shrink + weight * float(v[lane + 32 * i]);
  }

  __shared__ float of_warp[kWarps][32 * Parts];
  float of_all = block_max(largest), shrink = __expf(largest - of_all);
  total = block_sum(lane == 0 ? total * shrink : 0.0f);
#pragma unroll
  for (int i = 0; i < Parts; ++i) of_warp[warp][lane + 32 * i] = sums[i] * shrink;
  __syncthreads();
  for (int d = int(threadIdx.x); d < s.head_dim; d += int(blockDim.x)) {
    float sum = 0;
    for (int w = 0; w < kWarps; ++w) sum += of_warp[w][d];
    out[(row * s.heads + head) * s.head_dim + d] = rounded<T>(sum / total);
  }
}

// Columns [column, column + width of to) of from's rows become to's rows past, past + 1, ...
static void remember(const Tensor& to, const Tensor& from, int64_t column, int64_t past) {
  size_t size = size_of(to.dtype()), width = size_t(to.dim(1)) * size;
  check(cudaMemcpy2DAsync(to.raw() + size_t(past) * width, width,
                          from.raw() + size_t(column) * size, size_t(from.dim(1)) * size, width,
                          size_t(from.dim(0)), cudaMemcpyDeviceToDevice, device::stream()));
}

static void attention_cached(const Tensor& out, const Tensor& keys, const Tensor& values,
                             const Tensor& qkv, const AttentionShape& a, int64_t past) {
  CachedShape s{a.columns(),
                a.heads,
                a.heads / a.kv_heads,
                a.head_dim,
                a.kv_heads * a.head_dim,
                past,
                1 / sqrtf(float(a.head_dim))};
  require(a.sequences == 1 && past + a.length <= keys.dim(0), "a cache of ", keys.dim(0),
          " rows cannot take ", a.sequences, " x ", a.length, " more behind ", past);
  require(a.head_dim <= 256, "heads of ", a.head_dim, " elements; attention over a cache has ",
          "kernels for up to 256");
  expect("qkv", qkv, a.length * s.columns, qkv.dtype());
  expect("out", out, a.length * a.heads * a.head_dim, qkv.dtype());
  expect("keys", keys, keys.dim(0) * s.kv_width, qkv.dtype());
  expect("values", values, keys.dim(0) * s.kv_width, qkv.dtype());
  if (a.length == 0) return;
  remember(keys, qkv, a.heads * a.head_dim, past);
  remember(values, qkv, (a.heads + a.kv_heads) * a.head_dim, past);
  for_type(qkv.dtype(), [&](auto zero) {
    using T = decltype(zero);
    auto run = [&](auto parts) {
      launch(attention_cached_kernel<T, parts()>, {a.length, a.heads, 32 * kWarps}, as<T>(out),
             as<const T>(keys), as<const T>(values), as<const T>(qkv), s);
    };
    if (a.head_dim <= 64) return run(std::integral_constant<int, 2>{});
    if (a.head_dim <= 128) return run(std::integral_constant<int, 4>{});
    return run(std::integral_constant<int, 8>{});
  });
}

void add_decode(Kernels& k) { k.attention_cached = attention_cached; }

}  // namespace lockstep::cuda
