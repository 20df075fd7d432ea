// The pieces of tensor parallelism one by one, in double, against the same thing on one rank.

#include <gtest/gtest.h>

#include <numeric>

#include "tests/tensor_parallel_cases.h"

namespace lockstep {
namespace {

constexpr double kExact = 1e-12;  // sums in another order

Tensor drawn(const std::string& name, Shape shape) {
  std::vector<double> values(size_t(elements(shape)));
  for (size_t i = 0; i < values.size(); ++i) values[i] = RandomStream(1, name).normal(i);
  return Tensor::from(values, shape);
}
// A copy of rows or columns.
Tensor rows(const Tensor& t, Range r) {
  return Tensor::from(t.rows(r.first, r.count).values<double>(), {r.count, t.dim(1)});
}
Tensor columns(const Tensor& t, Range r) {
  std::vector<double> all = t.values<double>(), some;
  for (int64_t i = 0; i < t.dim(0); ++i)
    for (int64_t j = 0; j < r.count; ++j) some.push_back(all[size_t(i * t.dim(1) + r.first + j)]);
  return Tensor::from(some, {t.dim(0), r.count});
}
double dot(const Tensor& a, const Tensor& b) {
  std::vector<double> x = a.values<double>(), y = b.values<double>();
  return std::inner_product(x.begin(), x.end(), y.begin(), 0.0);
}
void expect_near(const Tensor& got, const Tensor& want, const std::string& what) {
  EXPECT_EQ(got.shape(), want.shape()) << what;
  EXPECT_LE(relative_error(got.values<double>(), want.values<double>()), kExact) << what;
}

void on_ranks(int ranks, const std::function<void(Communicator&)>& body) {
  run_threads(ranks, Device::CPU, {.time_limit = 10, .check_calls = true, .check_buffers = true},
              body);
}

// weight and bias, or what a rank has of them.
struct Layer {
  Layer(const Tensor& w, const Tensor& b) {
    set(weight, w);
    set(bias, b);
  }
  static void set(Parameter& p, const Tensor& t) {
    p.name = "parameter";
    p.shard = whole_shard(t.shape());
    p.value = t;
    p.grad = Tensor::zeros(t.shape(), t.dtype(), t.device());
  }
  Projection projection() { return {{&weight}, {&bias}}; }
  Parameter weight, bias;
};

// What one rank makes of it.
struct Dense {
  Dense(int64_t t, int64_t k, int64_t n)
      : x(drawn("x", {t, k})), w(drawn("w", {n, k})), b(drawn("b", {n})), dy(drawn("dy", {t, n})) {
    Layer layer(w, b);
    Tape tape;
    Var in = tape.leaf(x), out = linear(tape, in, layer.projection());
    tape.backward(out, dy);
    y = out.value, dx = tape.gradient(in), dw = layer.weight.grad, db = layer.bias.grad;
  }
  Tensor x, w, b, dy, y, dx, dw, db;
};

// --- The two linears ---------------------------------------------------------------------------

constexpr int64_t kRows = 16, kIn = 10, kOut = 13;  // over four ranks, columns are uneven

TEST(TensorParallel, T1_ColumnAndRowLinearAreTheDenseLayerForwardAndBackward) {
  const Dense dense(kRows, kIn, kOut);
  for (const Variant& variant : kVariants)
    for (int ranks : {1, 2, 4})
      on_ranks(ranks, [&](Communicator& tp) {
        SCOPED_TRACE(text(variant.name, " TP", ranks, " rank ", tp.rank()));
        Cut here{tp.rank(), ranks};
        Range out = share(kOut, here), in = share(kIn, here);
        auto stream = [&](const Tensor& t) {
          return variant.how.sequence_parallel ? rows(t, share(kRows, here)) : t;
        };
        Parts parts = plain_parts();
        use_tensor_parallel(parts, tp, variant.how);
        {
          std::vector<double> bias = dense.b.values<double>();
          bias = {bias.begin() + out.first, bias.begin() + out.first + out.count};
          Layer layer(rows(dense.w, out), Tensor::from(bias, {out.count}));
          Tape tape;
          Var x = tape.leaf(stream(dense.x)), y = parts.column(tape, x, layer.projection());
          tape.backward(y, columns(dense.dy, out));
          expect_near(y.value, columns(dense.y, out), "y of column-linear");
          expect_near(tape.gradient(x), stream(dense.dx), "dx of column-linear");
          expect_near(layer.weight.grad, rows(dense.dw, out), "dW of column-linear");
          expect_near(layer.bias.grad.view({out.count, 1}), rows(dense.db.view({kOut, 1}), out),
                      "db of column-linear");
        }
        Layer layer(columns(dense.w, in), dense.b);
        Tape tape;
        Var x = tape.leaf(columns(dense.x, in)), y = parts.row(tape, x, layer.projection());
        tape.backward(y, stream(dense.dy));
        expect_near(y.value, stream(dense.y), "y of row-linear");
        expect_near(tape.gradient(x), columns(dense.dx, in), "dx of row-linear");
        expect_near(layer.weight.grad, columns(dense.dw, in), "dW of row-linear");
        Tensor db = layer.bias.grad;  // of a rank's own rows, under sequence parallelism
        if (variant.how.sequence_parallel) db = summed_over_ranks(db, tp);
        expect_near(db, dense.db, "db of row-linear");
      });
}

// x W1^T W2^T, whole on every rank before and after.
TEST(TensorParallel, T2_ColumnThenRowCostsOneAllReduceRowThenColumnTwoCollectives) {
  const Tensor x = drawn("x", {4, 6}), w1 = drawn("w1", {8, 6}), w2 = drawn("w2", {6, 8});
  Parameter p1, p2;
  Layer::set(p1, w1);
  Layer::set(p2, w2);
  Tape alone;
  const Tensor want = linear(alone, linear(alone, {x}, {{&p1}}), {{&p2}}).value;
  for (int ranks : {2, 4})
    on_ranks(ranks, [&](Communicator& tp) {
      Cut here{tp.rank(), ranks};
      Range middle = share(8, here), ends = share(6, here);
      Conjugates conjugates{tp};
      const Ledger& ledger = tp.ledger();
      Parameter first, second;
      Layer::set(first, rows(w1, middle));
      Layer::set(second, columns(w2, middle));
      Tape tape;
      Var in = tape.leaf(x);
      Var y = row_linear(tape, column_linear(tape, in, {{&first}}, conjugates), {{&second}},
                         conjugates);
      expect_near(y.value, want, "column, then row");
      EXPECT_EQ(ledger.sum().calls, 1);
      EXPECT_EQ(ledger.sum(Collective::AllReduce).calls, 1);
      tape.backward(y, want);
      EXPECT_EQ(ledger.sum().calls, 2);
      EXPECT_EQ(ledger.sum(Collective::AllReduce).calls, 2);

      if (6 % ranks != 0) return;  // what is gathered below must be even
      tp.ledger().clear();
      Layer::set(first, columns(w1, ends));
      Layer::set(second, rows(w2, ends));
      Tape other;
      Var h = row_linear(other, other.leaf(columns(x, ends)), {{&first}}, conjugates);
      Tensor mine = column_linear(other, h, {{&second}}, conjugates).value;
      Tensor parts = Tensor::empty({ranks, 4, ends.count}, DType::F64, Device::CPU);
      tp.all_gather(mine, parts).wait();
      for (int r = 0; r < ranks; ++r)
        expect_near(parts.flat(r * mine.size(), mine.size()).view(mine.shape()),
                    columns(want, share(6, {r, ranks})), "row, then column");
      EXPECT_EQ(ledger.sum().calls, 2);
    });
}

// The bias is added behind the sum, not in each of its parts.
TEST(TensorParallel, Pitfall41_RowBiasCountsOnce) {
  const Tensor bias = Tensor::from<double>({100, 200, 300}, {3});
  for (const Variant& variant : kVariants)
    for (int ranks : {2, 4})
      on_ranks(ranks, [&](Communicator& tp) {
        Parts parts = plain_parts();
        use_tensor_parallel(parts, tp, variant.how);
        Layer layer(drawn("w", {3, 2}), bias);
        Tape tape;
        Tensor zero = Tensor::zeros({8, 2}, DType::F64, Device::CPU);
        Var y = parts.row(tape, tape.leaf(zero), layer.projection());
        std::vector<double> values = y.value.values<double>();
        for (size_t i = 0; i < values.size(); ++i)
          EXPECT_EQ(values[i], 100.0 * double(i % 3 + 1)) << variant.name << " TP" << ranks;
        Tensor ones = y.value.like();
        on(ones).fill(ones, 1);
        tape.backward(y, ones);
        Tensor db = layer.bias.grad;
        if (variant.how.sequence_parallel) db = summed_over_ranks(db, tp);
        EXPECT_EQ(db.values<double>(), (std::vector<double>{8, 8, 8})) << variant.name;
      });
}

// --- Conjugates --------------------------------------------------------------------------------

// <f(x), y> = <x, f*(y)>: the left side is summed over ranks, each of which has an own copy of x
// and an own y; in the right one x is one vector. g and g* likewise, and both ways round.
TEST(TensorParallel, T5_EachPairIsConjugate) {
  using Operation = Var (*)(Tape&, const Var&, Communicator&);
  struct Pair {
    const char* name;
    Operation into, out_of;
    bool spread;  // outside of the region, each rank has rows of its own
  };
  for (const Pair& pair : {Pair{"f", f, f_star, false}, Pair{"g", g, g_star, true}})
    for (int ranks : {1, 2, 4})
      on_ranks(ranks, [&](Communicator& tp) {
        SCOPED_TRACE(text(pair.name, " TP", ranks));
        auto sum = [&](double part) {
          Tensor t = Tensor::from<double>({part}, {1});
          tp.all_reduce(t).wait();
          return t.values<double>()[0];
        };
        // In the right side: of rows that all have, rank 0 speaks.
        auto once = [&](double part) { return sum(pair.spread || tp.rank() == 0 ? part : 0); };
        Tensor whole = drawn("x", {8, 3});
        Tensor x = pair.spread ? rows(whole, share(8, {tp.rank(), ranks})) : whole;
        Tensor y = drawn(text("y", tp.rank()), {8, 3});
        Tape tape, starred;
        Var in = tape.leaf(x), fx = pair.into(tape, in, tp);
        Var part = starred.leaf(y), fy = pair.out_of(starred, part, tp);
        double want = once(dot(x, fy.value));
        EXPECT_NEAR(sum(dot(fx.value, y)), want, kExact * std::abs(want));
        // Backward of the one is forward of the other, to the bit.
        tape.backward(fx, y);
        EXPECT_EQ(tape.gradient(in).values<double>(), fy.value.values<double>());
        starred.backward(fy, x);
        EXPECT_EQ(starred.gradient(part).values<double>(), fx.value.values<double>());
        EXPECT_EQ(x.values<double>(),
                  (pair.spread ? rows(whole, share(8, {tp.rank(), ranks})) : drawn("x", {8, 3}))
                      .values<double>());
        EXPECT_EQ(y.values<double>(), drawn(text("y", tp.rank()), {8, 3}).values<double>());
      });
}

// --- Vocabulary --------------------------------------------------------------------------------

TEST(TensorParallel, T7_EmbeddingLooksUpOnTheRankThatHasTheRow) {
  constexpr int64_t kVocab = 11, kHidden = 5, kTokens = 8;
  const Tensor table = drawn("table", {kVocab, kHidden}), dy = drawn("dy", {kTokens, kHidden});
  const Tensor ids = Tensor::from<int32_t>({0, 10, 3, 3, 5, 6, 9, 2}, {kTokens});
  Parameter whole;
  Layer::set(whole, table);
  Tape alone;
  Var want = embedding(alone, whole, ids);
  alone.backward(want, dy);
  for (bool sequence_parallel : {false, true})
    for (int ranks : {1, 2, 4})
      on_ranks(ranks, [&](Communicator& tp) {
        Cut here{tp.rank(), ranks};
        Range mine = share(kVocab, here);
        auto stream = [&](const Tensor& t) {
          return sequence_parallel ? rows(t, share(kTokens, here)) : t;
        };
        Parameter p;
        Layer::set(p, rows(table, mine));
        p.shard = cut_shard({kVocab, kHidden}, 0, mine);
        Tape tape;
        Var y = vocab_parallel_embedding(tape, p, ids, {tp, sequence_parallel});
        Collective operation =
            sequence_parallel ? Collective::ReduceScatter : Collective::AllReduce;
        EXPECT_EQ(tp.ledger().sum(operation).calls, ranks > 1 ? 1 : 0);
        EXPECT_EQ(tp.ledger().sum().calls, ranks > 1 ? 1 : 0);
        tape.backward(y, stream(dy));
        EXPECT_EQ(y.value.values<double>(), stream(want.value).values<double>());
        EXPECT_EQ(p.grad.values<double>(), rows(whole.grad, mine).values<double>());
      });
}

// Loss and gradient of logits [T, V] on so many ranks; `whole`: the mistake of row 42.
struct Loss {
  double value = 0;
  std::vector<double> gradient;    // [T, V], put together
  std::vector<LedgerEntry> calls;  // of rank 0
};
Loss loss_of(const Tensor& logits, const Tensor& targets, int ranks, bool whole = false) {
  Loss loss;
  int64_t vocab = logits.dim(1);
  loss.gradient.resize(size_t(logits.size()));
  on_ranks(ranks, [&](Communicator& tp) {
    Range mine = share(vocab, {tp.rank(), ranks});
    if (whole) mine = {tp.rank() * vocab, vocab};
    Tensor one = Tensor::from<double>({1}, {1});
    Tape tape;
    Var x = tape.leaf(whole ? logits : columns(logits, mine));
    Var y = vocab_parallel_cross_entropy(tape, x, targets, one, mine.first, tp);
    tape.backward(y, one);
    if (!whole) {
      std::vector<double> d = tape.gradient(x).values<double>();
      for (size_t i = 0; i < d.size(); ++i) {
        int64_t row = int64_t(i) / mine.count, column = mine.first + int64_t(i) % mine.count;
        loss.gradient[size_t(row * vocab + column)] = d[i];
      }
    }
    if (tp.rank() == 0) loss.value = y.value.values<double>()[0];
    if (tp.rank() == 0) loss.calls = tp.ledger().entries();
  });
  return loss;
}

TEST(TensorParallel, T7_CrossEntropyNeverGathersTheLogits) {
  constexpr int64_t kTokens = 6, kVocab = 13;
  const Tensor logits = drawn("logits", {kTokens, kVocab});
  const Tensor targets = Tensor::from<int32_t>({0, 12, -100, 7, 6, 3}, {kTokens});
  const Tensor one = Tensor::from<double>({1}, {1});
  Tape alone;
  Var x = alone.leaf(logits), want = cross_entropy(alone, x, targets, one);
  alone.backward(want, one);
  for (int ranks : {1, 2, 4, 8}) {
    Loss loss = loss_of(logits, targets, ranks);
    double value = want.value.values<double>()[0];
    EXPECT_NEAR(loss.value, value, kExact * value) << ranks;
    EXPECT_LE(relative_error(loss.gradient, alone.gradient(x).values<double>()), kExact);
    // Two numbers a token from every rank, and nothing else.
    ASSERT_EQ(loss.calls.size(), 1u);
    EXPECT_EQ(loss.calls[0].operation, Collective::AllGather);
    EXPECT_EQ(loss.calls[0].payload, ranks * 2 * kTokens * int64_t(sizeof(double)));
  }
}

TEST(TensorParallel, Pitfall42_WholeLogitsOnEveryRankWouldAddLnTP) {
  const Tensor logits = Tensor::from<double>({0.3, -1.2, 2.0, 0.5}, {1, 4});
  const Tensor target = Tensor::from<int32_t>({2}, {1});
  double sum = std::exp(0.3) + std::exp(-1.2) + std::exp(2.0) + std::exp(0.5);
  double serial = std::log(sum) - 2.0;
  for (int ranks : {2, 4}) {
    EXPECT_NEAR(loss_of(logits, target, ranks).value, serial, kExact);
    EXPECT_NEAR(loss_of(logits, target, ranks, true).value - serial, std::log(ranks), kExact);
  }
}

TEST(TensorParallel, Pitfall44_NoPaddingEntersTheSoftmax) {
  for (int64_t vocab : {int64_t(5), int64_t(50257)})
    for (int ranks : {2, 4}) {
      Tensor logits = Tensor::zeros({1, vocab}, DType::F64, Device::CPU);
      Loss loss = loss_of(logits, Tensor::from<int32_t>({4}, {1}), ranks);
      EXPECT_NEAR(loss.value, std::log(double(vocab)), kExact * std::log(double(vocab)));
      for (int64_t j = 0; j < vocab; ++j)
        ASSERT_NEAR(loss.gradient[size_t(j)], 1.0 / double(vocab) - (j == 4), kExact);
    }
}

}  // namespace
}  // namespace lockstep
