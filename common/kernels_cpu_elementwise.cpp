// Element by element, the loss and the optimizer, on the CPU.

#include <cmath>
#include <limits>

#include "common/kernels_cpu.h"

namespace lockstep::cpu {

static void dropout(const Tensor& out, const Tensor& x, const Tensor& rows, float p,
                    RandomStream stream, int64_t width, int64_t first) {
  int64_t columns = x.size() / std::max<int64_t>(1, rows.size());
  with_type(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    using Sum = typename SumOf<T>::type;
    Sum keep = 1 / (1 - Sum(p));
    parallel(rows.size(), 32 * columns, [&](int64_t t) {
      uint64_t index = uint64_t(rows.data<int64_t>()[t] * width + first);
      const T* in = x.data<T>() + t * columns;
      T* to = out.data<T>() + t * columns;
      for (int64_t j = 0; j < columns; ++j)
        to[j] = stream.uniform(index + uint64_t(j)) >= p ? T(Sum(in[j]) * keep) : zero;
    });
  });
}

// log(sum(exp(x(0)), …, exp(x(n - 1)))), relative to the largest. Of nothing but -inf it is -inf: a
// rank's part of a row may be that.
template <class Sum, class X>
static Sum log_sum_exp(int64_t n, X x) {
  Sum largest = std::numeric_limits<Sum>::lowest(), sum = 0;
  for (int64_t j = 0; j < n; ++j) largest = std::max(largest, x(j));
  for (int64_t j = 0; j < n; ++j) sum += std::exp(x(j) - largest);
  return largest + std::log(sum);
}

// The loss of a row is lse - logit[target], with lse taken relative to the largest logit so that no
// exponential overflows.
static void cross_entropy(const Tensor& loss, const Tensor& lse, const Tensor& logits,
                          const Tensor& targets, const Tensor& scale) {
  int64_t vocab = logits.dim(1), rows = logits.dim(0);
  with_type(logits.dtype(), [&](auto zero) {
    using T = decltype(zero);
    using Sum = typename SumOf<T>::type;
    std::vector<Sum> row_loss(size_t(rows), Sum(0));
    parallel(rows, 4 * vocab, [&](int64_t t) {
      const T* row = logits.data<T>() + t * vocab;
      Sum l = log_sum_exp<Sum>(vocab, [&](int64_t j) { return Sum(row[j]); });
      lse.data<Sum>()[t] = l;
      int64_t target = targets.data<int32_t>()[t];
      if (target >= 0) row_loss[size_t(t)] = l - Sum(row[target]);
    });
    Sum total = 0;
    for (Sum l : row_loss) total += l;
    loss.data<Sum>()[0] = total * scale.data<Sum>()[0];
  });
}

// d loss / d logit_j = softmax_j - [j is the target], times what a token counts.
static void cross_entropy_backward(const Tensor& d_logits, const Tensor& d_loss,
                                   const Tensor& logits, const Tensor& lse, const Tensor& targets,
                                   const Tensor& scale, int64_t first) {
  int64_t vocab = logits.dim(1);
  with_type(logits.dtype(), [&](auto zero) {
    using T = decltype(zero);
    using Sum = typename SumOf<T>::type;
    Sum weight = d_loss.data<Sum>()[0] * scale.data<Sum>()[0];
    parallel(logits.dim(0), 4 * vocab, [&](int64_t t) {
      const T* row = logits.data<T>() + t * vocab;
      T* d = d_logits.data<T>() + t * vocab;
      int64_t target = targets.data<int32_t>()[t];
      Sum l = lse.data<Sum>()[t], w = target >= 0 ? weight : Sum(0);
      for (int64_t j = 0; j < vocab; ++j)
        d[j] = T(w * (std::exp(Sum(row[j]) - l) - (first + j == target ? Sum(1) : Sum(0))));
    });
  });
}

static void vocab_statistics(const Tensor& statistics, const Tensor& logits, const Tensor& targets,
                             int64_t first) {
  int64_t columns = logits.dim(1), rows = logits.dim(0);
  with_type(logits.dtype(), [&](auto zero) {
    using T = decltype(zero);
    using Sum = typename SumOf<T>::type;
    parallel(rows, 4 * columns, [&](int64_t t) {
      const T* row = logits.data<T>() + t * columns;
      int64_t target = targets.data<int32_t>()[t] - first;
      Sum* out = statistics.data<Sum>();
      out[t] = log_sum_exp<Sum>(columns, [&](int64_t j) { return Sum(row[j]); });
      out[rows + t] = target >= 0 && target < columns ? Sum(row[target]) : Sum(0);
    });
  });
}

static void vocab_cross_entropy(const Tensor& loss, const Tensor& lse, const Tensor& all,
                                const Tensor& targets, const Tensor& scale) {
  int64_t ranks = all.dim(0), rows = all.dim(2);
  with_type(all.dtype(), [&](auto zero) {
    using Sum = typename SumOf<decltype(zero)>::type;
    const Sum* in = all.data<Sum>();
    Sum total = 0;
    for (int64_t t = 0; t < rows; ++t) {
      Sum l = log_sum_exp<Sum>(ranks, [&](int64_t r) { return in[2 * r * rows + t]; });
      lse.data<Sum>()[t] = l;
      if (targets.data<int32_t>()[t] < 0) continue;
      for (int64_t r = 0; r < ranks; ++r) l -= in[(2 * r + 1) * rows + t];
      total += l;
    }
    loss.data<Sum>()[0] = total * scale.data<Sum>()[0];
  });
}

void add_loss(Kernels& k) {
  k.vocab_statistics = vocab_statistics;
  k.vocab_cross_entropy = vocab_cross_entropy;
  k.cross_entropy = cross_entropy;
  k.cross_entropy_backward = cross_entropy_backward;
}

static void add(const Tensor& out, const Tensor& a, const Tensor& b) {
  with_type(out.dtype(), [&](auto zero) {
    using T = decltype(zero);
    using Sum = typename SumOf<T>::type;
    const T *x = a.data<T>(), *y = b.data<T>();
    T* to = out.data<T>();
    parallel_ranges(out.size(), [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i) to[i] = T(Sum(x[i]) + Sum(y[i]));
    });
  });
}

// f(element of to, element of from) for tensors whose types may differ.
template <class F>
static void zip(const Tensor& to, const Tensor& from, F&& f) {
  require(to.size() == from.size(), "tensors of ", to.size(), " and ", from.size(), " elements");
  with_type(to.dtype(), [&](auto to_zero) {
    using A = decltype(to_zero);
    with_type(from.dtype(), [&](auto from_zero) {
      using B = decltype(from_zero);
      A* a = to.data<A>();
      const B* b = from.data<B>();
      parallel_ranges(to.size(), [&](int64_t first, int64_t last) {
        for (int64_t i = first; i < last; ++i) f(a[i], b[i]);
      });
    });
  });
}

static void add_into(const Tensor& sum, const Tensor& x) {
  zip(sum, x, []<class A, class B>(A& a, const B& b) {
    using Sum = typename SumOf<A>::type;
    a = A(Sum(a) + Sum(b));
  });
}

static void cast(const Tensor& to, const Tensor& from) {
  zip(to, from, []<class A, class B>(A& a, const B& b) {
    a = A(typename SumOf<A>::type(typename SumOf<B>::type(b)));
  });
}

static void fill(const Tensor& t, double value) {
  with_type(t.dtype(), [&](auto zero) {
    using T = decltype(zero);
    std::fill_n(t.data<T>(), t.size(), T(value));
  });
}

static void fill_normal(const Tensor& t, float std, RandomStream stream, IndexMap map,
                        int64_t first) {
  with_type(t.dtype(), [&](auto zero) {
    using T = decltype(zero);
    T* to = t.data<T>();
    parallel_ranges(t.size(), [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i)
        to[i] = T(std * stream.normal(uint64_t(map.whole(first + i))));
    });
  });
}

void add_elementwise(Kernels& k) {
  k.dropout = dropout;
  k.add = add;
  k.add_into = add_into;
  k.cast = cast;
  k.fill = fill;
  k.fill_normal = fill_normal;
}

static StepState& state_of(const Tensor& state) {
  require(state.size() == int64_t(sizeof(StepState)), "a step's state has ", sizeof(StepState),
          " bytes, not ", state.size());
  return *reinterpret_cast<StepState*>(state.raw());
}

static double sum_of_squares(const Tensor& x) {
  return with_type(x.dtype(), [&](auto zero) {
    using T = decltype(zero);
    const T* in = x.data<T>();
    return sum_in_order(x.size(), [&](int64_t first, int64_t last) {
      double part = 0;
      for (int64_t i = first; i < last; ++i) part += double(in[i]) * double(in[i]);
      return part;
    });
  });
}

static void sum_squares(const Tensor& sums, const std::vector<Tensor>& all) {
  require(sums.size() == int64_t(all.size()), "the squares of ", all.size(),
          " tensors have no room", " in ", sums.size(), " sums");
  for (size_t i = 0; i < all.size(); ++i)
    sums.data<double>()[i] = all[i].defined() ? sum_of_squares(all[i]) : 0;
}

static void begin_step(const Tensor& state, const Tensor& scale, const Tensor& valid) {
  StepState& s = state_of(state);
  s.loss = 0;
  s.valid_tokens = valid.data<int64_t>()[0];
  double per_token = s.valid_tokens > 0 ? 1.0 / double(s.valid_tokens) : 0.0;
  kernels(Device::CPU).fill(scale, per_token);
}

static void add_step_loss(const Tensor& state, const Tensor& loss) {
  with_type(loss.dtype(), [&](auto zero) {
    using T = decltype(zero);
    state_of(state).loss += double(loss.data<T>()[0]);
  });
}

static void local_sums(const Tensor& sums, const Tensor& state, const Tensor& squares) {
  double norm_squared = 0;
  for (int64_t i = 0; i < squares.size(); ++i) norm_squared += squares.data<double>()[i];
  sums.data<double>()[0] = state_of(state).loss;
  sums.data<double>()[1] = norm_squared;
}

static void begin_step_update(const Tensor& state, const Tensor& sums, const UpdateRule& rule) {
  state_of(state).loss = sums.data<double>()[0];
  begin_update(state_of(state), sums.data<double>()[1], rule);
}

static void adamw(const Tensor& value, const Tensor& master, const Tensor& m, const Tensor& v,
                  const Tensor& grad, const Tensor& state, const UpdateRule& rule, bool decay) {
  const StepState& s = state_of(state);
  if (s.skip) return;
  float weight_decay = decay ? rule.weight_decay : 0.0f;
  with_type(grad.dtype(), [&](auto zero) {
    using G = decltype(zero);
    using T = typename SumOf<G>::type;  // what the master weights are kept in
    T *w = master.data<T>(), *pm = m.data<T>(), *pv = v.data<T>();
    const G* g = grad.data<G>();
    parallel_ranges(master.size(), [&](int64_t first, int64_t last) {
      for (int64_t i = first; i < last; ++i)
        adamw_element<T>(w[i], pm[i], pv[i], T(g[i]), weight_decay, s, rule);
    });
  });
  if (value.raw() != master.raw()) cast(value, master);
}

void add_optimizer(Kernels& k) {
  k.sum_squares = sum_squares;
  k.begin_step = begin_step;
  k.add_loss = add_step_loss;
  k.local_sums = local_sums;
  k.begin_update = begin_step_update;
  k.adamw = adamw;
}

}  // namespace lockstep::cpu
