// Element by element, on CUDA.

#include "common/kernels_cuda.h"

namespace lockstep::cuda {

template <class T, bool Even>
__global__ void add_kernel(T* out, const T* a, const T* b, int64_t n) {
  constexpr int N = kPack<T>;
  int64_t i = flat_index() * N;
  if (i >= n) return;
  Pack<T, N> x = load<Even, N>(a + i, n - i), y = load<Even, N>(b + i, n - i);
  for (int k = 0; k < N; ++k) x.at[k] = rounded<T>(float(x.at[k]) + float(y.at[k]));
  store<Even>(out + i, n - i, x);
}

static void add(const Tensor& out, const Tensor& a, const Tensor& b) {
  int64_t n = out.size();
  expect("out", out, n, a.dtype());
  expect("a", a, n, a.dtype());
  expect("b", b, n, a.dtype());
  for_type(a.dtype(), [&](auto zero) {
    using T = decltype(zero);
    branch(is_even(kPack<T>, n, out, a, b), [&](auto even) {
      launch(add_kernel<T, even()>, flat_grid(n, kPack<T>), as<T>(out), as<T>(a), as<T>(b), n);
    });
  });
}

// to = from, or to += from.
template <class A, class B, bool Even, bool Adds>
__global__ void move_kernel(A* to, const B* from, int64_t n) {
  constexpr int N = kPack<A, B>;
  int64_t i = flat_index() * N;
  if (i >= n) return;
  Pack<B, N> b = load<Even, N>(from + i, n - i);
  Pack<A, N> a{};
  if constexpr (Adds) a = load<Even, N>(to + i, n - i);
  for (int k = 0; k < N; ++k)
    a.at[k] = rounded<A>(Adds ? float(a.at[k]) + float(b.at[k]) : float(b.at[k]));
  store<Even>(to + i, n - i, a);
}

template <bool Adds>
static void move(const Tensor& to, const Tensor& from) {
  int64_t n = to.size();
  expect("the result", to, n, to.dtype());
  expect("the input", from, n, from.dtype());
  for_type(to.dtype(), [&](auto to_zero) {
    using A = decltype(to_zero);
    for_type(from.dtype(), [&](auto from_zero) {
      using B = decltype(from_zero);
      constexpr int N = kPack<A, B>;
      branch(is_even(N, n, to, from), [&](auto even) {
        launch(move_kernel<A, B, even(), Adds>, flat_grid(n, N), as<A>(to), as<B>(from), n);
      });
    });
  });
}
static void add_into(const Tensor& sum, const Tensor& x) { move<true>(sum, x); }
static void cast(const Tensor& to, const Tensor& from) { move<false>(to, from); }

template <class T, bool Even>
__global__ void fill_kernel(T* t, float value, int64_t n) {
  constexpr int N = kPack<T>;
  int64_t i = flat_index() * N;
  if (i >= n) return;
  Pack<T, N> pack;
  for (int k = 0; k < N; ++k) pack.at[k] = rounded<T>(value);
  store<Even>(t + i, n - i, pack);
}

static void fill(const Tensor& t, double value) {
  int64_t n = t.size();
  expect("t", t, n, t.dtype());
  for_type(t.dtype(), [&](auto zero) {
    using T = decltype(zero);
    branch(is_even(kPack<T>, n, t), [&](auto even) {
      launch(fill_kernel<T, even()>, flat_grid(n, kPack<T>), as<T>(t), float(value), n);
    });
  });
}

// Runs once per weight: nothing here needs to be quick.
template <class T>
__global__ void fill_normal_kernel(T* t, float std, RandomStream stream, IndexMap map,
                                   int64_t first, int64_t n) {
  int64_t i = flat_index();
  if (i < n) t[i] = rounded<T>(std * stream.normal(uint64_t(map.whole(first + i))));
}

static void fill_normal(const Tensor& t, float std, RandomStream stream, IndexMap map,
                        int64_t first) {
  int64_t n = t.size();
  expect("t", t, n, t.dtype());
  for_type(t.dtype(), [&](auto zero) {
    using T = decltype(zero);
    launch(fill_normal_kernel<T>, flat_grid(n, 1), as<T>(t), std, stream, map, first, n);
  });
}

template <class T, bool Even>
__global__ void dropout_kernel(T* out, const T* x, const int64_t* rows, float p,
                               RandomStream stream, int64_t width, int64_t first, int64_t columns) {
  constexpr int N = kPack<T>;
  int64_t j = column<N>(), t = blockIdx.x, at = t * columns + j;
  if (j >= columns) return;
  uint64_t index = uint64_t(rows[t] * width + first + j);
  float keep = 1 / (1 - p);
  Pack<T, N> pack = load<Even, N>(x + at, columns - j);
  for (int k = 0; k < N; ++k) {
    bool kept = stream.uniform(index + uint64_t(k)) >= p;
    pack.at[k] = rounded<T>(kept ? float(pack.at[k]) * keep : 0.0f);
  }
  store<Even>(out + at, columns - j, pack);
}

static void dropout(const Tensor& out, const Tensor& x, const Tensor& rows, float p,
                    RandomStream stream, int64_t width, int64_t first) {
  int64_t count = rows.size(), columns = x.size() / std::max<int64_t>(1, count);
  expect("rows", rows, count, DType::I64);
  expect("x", x, count * columns, x.dtype());
  expect("out", out, count * columns, x.dtype());
  for_type(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    branch(is_even(kPack<T>, columns, out, x), [&](auto even) {
      launch(dropout_kernel<T, even()>, row_grid(count, columns, kPack<T>), as<T>(out), as<T>(x),
             as<int64_t>(rows), p, stream, width, first, columns);
    });
  });
}

void add_elementwise(Kernels& k) {
  k.add = add;
  k.add_into = add_into;
  k.cast = cast;
  k.fill = fill;
  k.fill_normal = fill_normal;
  k.dropout = dropout;
}

}  // namespace lockstep::cuda
