// The embedding on CUDA. Forward copies rows. Backward adds rows, and many tokens may add to the
// same row of the table: instead of letting them race, we sort the tokens by id and give each run
// of equal ids to one block (to several, side by side, for wide rows), which adds its rows in the
// order of the tokens.

#include <bit>
#include <cub/device/device_radix_sort.cuh>

#include "common/kernels_cuda.h"

namespace lockstep::cuda {

template <class T, bool Even>
__global__ void embedding_kernel(T* out, const T* table, const int32_t* ids, int64_t first,
                                 int64_t vocab, int64_t width) {
  constexpr int N = kPack<T>;
  int64_t j = column<N>(), t = blockIdx.x, id = ids[t] - first;
  if (j >= width) return;
  Pack<T, N> pack{};
  if (id >= 0 && id < vocab) pack = load<Even, N>(table + id * width + j, width - j);
  store<Even>(out + t * width + j, width - j, pack);
}

static void embedding(const Tensor& out, const Tensor& table, const Tensor& ids, int64_t first) {
  int64_t rows = ids.size(), vocab = table.dim(0), width = table.dim(1);
  expect("ids", ids, rows, DType::I32);
  expect("table", table, vocab * width, table.dtype());
  expect("out", out, rows * width, table.dtype());
  for_type(out.dtype(), [&](auto zero) {
    using T = decltype(zero);
    branch(is_even(kPack<T>, width, out, table), [&](auto even) {
      launch(embedding_kernel<T, even()>, row_grid(rows, width, kPack<T>), as<T>(out), as<T>(table),
             as<int32_t>(ids), first, vocab, width);
    });
  });
}

// What is sorted: the row of the table for each token (`vocab` for rows that are not here, so that
// they come last), and the token.
__global__ void sort_input_kernel(int32_t* keys, int32_t* tokens, const int32_t* ids, int64_t first,
                                  int64_t vocab, int64_t count) {
  int64_t t = flat_index();
  if (t >= count) return;
  int64_t id = ids[t] - first;
  keys[t] = int32_t(id >= 0 && id < vocab ? id : vocab);
  tokens[t] = int32_t(t);
}

// The first place behind the run of equal keys that begins at `first`: binary search.
__device__ static int64_t end_of_run(const int32_t* keys, int64_t first, int64_t count) {
  int64_t low = first + 1, high = count;
  while (low < high) {
    int64_t middle = (low + high) / 2;
    if (keys[middle] == keys[first]) {
      low = middle + 1;
    } else {
      high = middle;
    }
  }
  return low;
}

template <class G, class T, bool Even>
__global__ void add_runs_kernel(G* d_table, const T* d_out, const int32_t* keys,
                                const int32_t* tokens, int64_t count, int64_t vocab,
                                int64_t width) {
  constexpr int N = kPack<G, T>;
  int64_t first = blockIdx.x, j = column<N>();
  int64_t key = keys[first];
  bool begins_run = first == 0 || keys[first - 1] != key;
  if (j >= width || key == vocab || !begins_run) return;
  int64_t last = end_of_run(keys, first, count);
  float sum[N] = {};
#pragma unroll 4
  for (int64_t i = first; i < last; ++i) {
    Pack<T, N> d = load<Even, N>(d_out + tokens[i] * width + j, width - j);
    for (int k = 0; k < N; ++k) sum[k] += float(d.at[k]);
  }
  G* at = d_table + key * width + j;
  Pack<G, N> g = load<Even, N>(at, width - j);
  for (int k = 0; k < N; ++k) g.at[k] = rounded<G>(float(g.at[k]) + sum[k]);
  store<Even>(at, width - j, g);
}

static void embedding_backward(const Tensor& d_table, const Tensor& d_out, const Tensor& ids,
                               int64_t first) {
  int64_t count = ids.size(), vocab = d_table.dim(0), width = d_table.dim(1);
  require(count <= INT32_MAX && vocab < INT32_MAX, count, " tokens and a table of ", vocab,
          " rows: the sort counts both in 31 bits");
  expect("ids", ids, count, DType::I32);
  expect("d_table", d_table, vocab * width, d_table.dtype());
  expect("d_out", d_out, count * width, d_out.dtype());
  if (d_out.size() == 0 || vocab == 0) return;
  auto buffer = [](int64_t n, DType type) {
    return Tensor::empty({n}, type, Device::CUDA, Category::Buffers);
  };
  Tensor keys = buffer(count, DType::I32), tokens = buffer(count, DType::I32);
  Tensor sorted_keys = buffer(count, DType::I32), sorted_tokens = buffer(count, DType::I32);
  launch(sort_input_kernel, flat_grid(count, 1), as<int32_t>(keys), as<int32_t>(tokens),
         as<int32_t>(ids), first, vocab, count);

  // Radix sort keeps the order of equal keys. The first call only says how much memory it needs.
  size_t bytes = 0;
  auto sort = [&](void* memory) {
    check(cub::DeviceRadixSort::SortPairs(memory, bytes, as<int32_t>(keys),
                                          as<int32_t>(sorted_keys), as<int32_t>(tokens),
                                          as<int32_t>(sorted_tokens), int(count), 0,
                                          std::bit_width(uint64_t(vocab)), device::stream()));
  };
  sort(nullptr);
  Tensor memory = buffer(std::max<int64_t>(1, int64_t(bytes)), DType::U8);
  sort(memory.raw());

  for_type(d_table.dtype(), [&](auto table_zero) {
    using G = decltype(table_zero);
    for_type(d_out.dtype(), [&](auto out_zero) {
      using T = decltype(out_zero);
      constexpr int N = kPack<G, T>;
      branch(is_even(N, width, d_table, d_out), [&](auto even) {
        launch(add_runs_kernel<G, T, even()>, row_grid(count, width, N), as<G>(d_table),
               as<T>(d_out), as<int32_t>(sorted_keys), as<int32_t>(sorted_tokens), count, vocab,
               width);
      });
    });
  });
}

void add_embedding(Kernels& k) {
  k.embedding = embedding;
  k.embedding_backward = embedding_backward;
}

}  // namespace lockstep::cuda
