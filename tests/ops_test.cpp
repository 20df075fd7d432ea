// Every differentiable operation against finite differences, and the rules of the tape.

#include "common/ops.h"

#include "tests/gradient_check.h"

namespace lockstep {
namespace {

constexpr auto kCpu = Device::CPU;

TEST(Ops, LinearOfNeighboursIsOneMatmul) {
  Parameter q = parameter("q", {3, 4}), k = parameter("k", {2, 4});
  Tensor values = random_tensor({5, 4}, "q|k"), grads = Tensor::zeros({5, 4}, DType::F64, kCpu);
  q.value = values.rows(0, 3), k.value = values.rows(3, 2);
  q.grad = grads.rows(0, 3), k.grad = grads.rows(3, 2);
  Parameter bias = parameter("bias", {5});
  auto f = [&](Tape& t, const std::vector<Var>& x) {
    return std::vector<Var>{linear(t, x[0], {{&q, &k}, {&bias}})};
  };
  expect_gradients(f, {random_tensor({6, 4}, "x")}, {&q, &k, &bias});
}

TEST(Ops, LinearRefusesWeightsThatAreNoNeighbours) {
  Parameter q = parameter("q", {3, 4}), k = parameter("k", {2, 4});
  Tape tape;
  EXPECT_THROW(linear(tape, {random_tensor({6, 4}, "x")}, {{&q, &k}}), Error);
}

TEST(Ops, Embedding) {
  Parameter table = parameter("table", {5, 3});
  Tensor ids = Tensor::from<int32_t>({4, 0, 4, 2, 1, 3}, {6});
  auto f = [&](Tape& t, const std::vector<Var>&) {
    return std::vector<Var>{embedding(t, table, ids)};
  };
  expect_gradients(f, {}, {&table});
}

TEST(Ops, EmbeddingGivesZerosOutsideItsRows) {
  Parameter table = parameter("table", {5, 3});
  Tape tape;
  Var out = embedding(tape, table, Tensor::from<int32_t>({9, 10, 15}, {3}), 10);
  EXPECT_EQ(out.value.rows(0, 1).values<double>(), std::vector<double>(3, 0.0));
  EXPECT_EQ(out.value.rows(1, 1).values<double>(), table.value.rows(0, 1).values<double>());
  EXPECT_EQ(out.value.rows(2, 1).values<double>(), std::vector<double>(3, 0.0));
}

TEST(Ops, RmsNorm) {
  Parameter gain = parameter("gain", {7});
  auto f = [&](Tape& t, const std::vector<Var>& x) {
    return std::vector<Var>{rmsnorm(t, x[0], gain, 1e-5)};
  };
  expect_gradients(f, {random_tensor({4, 7}, "x")}, {&gain});
}

TEST(Ops, AddRmsNormHasTwoOutputs) {
  Parameter gain = parameter("gain", {7});
  auto both = [&](Tape& t, const std::vector<Var>& x) {
    Normed n = add_rmsnorm(t, x[0], x[1], gain, 1e-5);
    return std::vector<Var>{n.sum, n.normed};
  };
  std::vector<Tensor> inputs = {random_tensor({4, 7}, "x"), random_tensor({4, 7}, "delta")};
  expect_gradients(both, inputs, {&gain});
  auto norm_only = [&](Tape& t, const std::vector<Var>& x) {
    return std::vector<Var>{add_rmsnorm(t, x[0], x[1], gain, 1e-5).normed};
  };
  expect_gradients(norm_only, inputs, {&gain});
  auto sum_only = [&](Tape& t, const std::vector<Var>& x) {
    return std::vector<Var>{add_rmsnorm(t, x[0], x[1], gain, 1e-5).sum};
  };
  expect_gradients(sum_only, inputs);
}

TEST(Ops, AddSumsGradientsOfAValueThatIsUsedTwice) {
  auto f = [](Tape& t, const std::vector<Var>& x) {
    return std::vector<Var>{add(t, add(t, x[0], x[1]), x[0])};
  };
  expect_gradients(f, {random_tensor({3, 2}, "a"), random_tensor({3, 2}, "b")});
}

TEST(Ops, Rope) {
  AttentionShape shape{2, 3, 2, 1, 4};
  Tensor positions = Tensor::from<int32_t>({0, 1, 2, 0, 1, 2}, {6});
  Tensor frequencies = rope_frequencies(4, 100, DType::F64, kCpu);
  auto f = [&](Tape& t, const std::vector<Var>& x) {
    return std::vector<Var>{rope(t, x[0], positions, frequencies, shape)};
  };
  expect_gradients(f, {random_tensor({6, shape.columns()}, "qkv")});
}

// MHA (a key head per query head), GQA (two query heads share one) and MQA (all share one).
TEST(Ops, S15_AttentionForMhaGqaAndMqa) {
  for (int64_t kv_heads : {4, 2, 1}) {
    AttentionShape shape{2, 5, 4, kv_heads, 6};
    auto f = [&](Tape& t, const std::vector<Var>& x) {
      return std::vector<Var>{plain_attention(t, x[0], shape)};
    };
    expect_gradients(f, {random_tensor({10, shape.columns()}, "qkv")});
  }
}

// GQA is MHA with every key/value head repeated for its group of query heads.
TEST(Ops, S15_GroupedHeadsEqualRepeatedHeads) {
  AttentionShape grouped{1, 7, 8, 2, 4}, full{1, 7, 8, 8, 4};
  Tensor narrow = random_tensor({7, grouped.columns()}, "qkv");
  Tensor wide = Tensor::empty({7, full.columns()}, DType::F64, kCpu);
  for (int64_t t = 0; t < 7; ++t) {
    const double* from = narrow.data<double>() + t * grouped.columns();
    double* to = wide.data<double>() + t * full.columns();
    for (int64_t i = 0; i < 32; ++i) {
      int64_t shared = (i / 4) / 4 * 4 + i % 4;  // head i / 4 reads key head (i / 4) / 4
      to[i] = from[i];
      to[32 + i] = from[32 + shared];
      to[64 + i] = from[32 + 8 + shared];
    }
  }
  Tape tape(Tape::Mode::Forget);
  std::vector<double> a = plain_attention(tape, {narrow}, grouped).value.values<double>();
  std::vector<double> b = plain_attention(tape, {wide}, full).value.values<double>();
  for (size_t i = 0; i < a.size(); ++i) EXPECT_NEAR(a[i], b[i], 1e-12);
}

TEST(Ops, SwiGlu) {
  auto f = [](Tape& t, const std::vector<Var>& x) { return std::vector<Var>{swiglu(t, x[0])}; };
  expect_gradients(f, {random_tensor({3, 10}, "gate|up")});
}

TEST(Ops, Dropout) {
  Tensor rows = Tensor::from<int64_t>({11, 5, 1000000007}, {3});
  auto f = [&](Tape& t, const std::vector<Var>& x) {
    return std::vector<Var>{dropout(t, x[0], rows, 0.4, RandomStream(3, "mask"), 16)};
  };
  expect_gradients(f, {random_tensor({3, 16}, "x")});
}

TEST(Ops, DropoutKeepsTheMeanAndDependsOnGlobalIndicesOnly) {
  constexpr int64_t kRows = 200, kWidth = 50;
  std::vector<int64_t> ids(kRows);
  for (int64_t t = 0; t < kRows; ++t) ids[size_t(t)] = 1000 + t;
  Tensor ones = Tensor::empty({kRows, kWidth}, DType::F64, kCpu);
  on(ones).fill(ones, 1);
  Tape tape(Tape::Mode::Forget);
  RandomStream mask(3, "mask");
  Tensor whole = dropout(tape, {ones}, Tensor::from(ids, {kRows}), 0.25, mask, kWidth).value;
  double sum = 0;
  for (double x : whole.values<double>()) {
    EXPECT_TRUE(x == 0 || std::abs(x - 4.0 / 3) < 1e-7);
    sum += x;
  }
  EXPECT_NEAR(sum / (kRows * kWidth), 1, 0.03);
  // the last 20 columns of rows 150.. on their own, as a rank that holds only those would see them
  Tensor part_ones = ones.flat(0, 50 * 20).view({50, 20});
  Tensor part_rows = Tensor::from(ids, {kRows}).rows(150, 50);
  Tensor part = dropout(tape, {part_ones}, part_rows, 0.25, mask, kWidth, 30).value;
  for (int64_t t = 0; t < 50; ++t)
    for (int64_t j = 0; j < 20; ++j)
      EXPECT_EQ(part.data<double>()[t * 20 + j], whole.data<double>()[(150 + t) * kWidth + 30 + j]);
}

TEST(Ops, CrossEntropyIgnoresNegativeTargets) {
  Tensor targets = Tensor::from<int32_t>({2, -1, 0, 4, -100}, {5});
  Tensor scale = Tensor::from<double>({1.0 / 3}, {1});
  auto f = [&](Tape& t, const std::vector<Var>& x) {
    return std::vector<Var>{cross_entropy(t, x[0], targets, scale)};
  };
  expect_gradients(f, {random_tensor({5, 6}, "logits")});
}

TEST(Ops, CrossEntropyOfEqualLogitsIsLogOfTheirNumber) {
  Tape tape(Tape::Mode::Forget);
  Tensor logits = Tensor::zeros({1, 5}, DType::F64, kCpu);
  on(logits).fill(logits, 700);  // exp(700) alone would overflow soon
  Tensor target = Tensor::from<int32_t>({3}, {1}), one = Tensor::from<double>({1}, {1});
  EXPECT_NEAR(cross_entropy(tape, {logits}, target, one).value.values<double>()[0], std::log(5.0),
              1e-12);
}

TEST(Tape, RunsWeightWorkLaterInBackwardOrder) {
  std::vector<std::string> order;
  Parameter a = parameter("a", {3, 3}), b = parameter("b", {3, 3});
  for (Parameter* p : {&a, &b}) {
    p->need_grad = [&](Parameter& q) { order.push_back("need " + q.name); };
    p->on_grad_ready = [&](Parameter& q) { order.push_back("ready " + q.name); };
  }
  Tape tape;
  Var x = tape.leaf(random_tensor({2, 3}, "x"));
  Var y = linear(tape, linear(tape, linear(tape, x, {{&a}}), {{&b}}), {{&a}});
  tape.backward(y, random_tensor({2, 3}, "dy"), Tape::WeightWork::Later);
  EXPECT_TRUE(order.empty());
  EXPECT_TRUE(tape.gradient(x).defined());
  std::vector<double> before = a.grad.values<double>();
  EXPECT_EQ(before, std::vector<double>(9, 0.0));
  tape.weight_work();
  // a is used first and last in forward: it is needed first, and ready after b
  EXPECT_EQ(order, (std::vector<std::string>{"need a", "need b", "ready b", "ready a"}));
  EXPECT_NE(a.grad.values<double>(), before);
  EXPECT_EQ(tape.weights(), (std::vector<Parameter*>{&a, &b}));
}

TEST(Tape, LaterAndNowGiveTheSameBits) {
  auto gradients = [](Tape::WeightWork when) {
    Parameter a = parameter("a", {3, 3}), b = parameter("b", {3, 3});
    Tape tape;
    Var y = linear(tape, linear(tape, {random_tensor({2, 3}, "x")}, {{&a}}), {{&b}});
    tape.backward(y, random_tensor({2, 3}, "dy"), when);
    tape.weight_work();
    std::vector<double> all = a.grad.values<double>(), more = b.grad.values<double>();
    all.insert(all.end(), more.begin(), more.end());
    return all;
  };
  EXPECT_EQ(gradients(Tape::WeightWork::Now), gradients(Tape::WeightWork::Later));
}

TEST(Tape, HooksFireForEntriesThatNoGradientReached) {
  Parameter used = parameter("used", {3, 3}), idle = parameter("idle", {3, 3});
  int fired = 0;
  idle.on_grad_ready = [&](Parameter&) { ++fired; };
  Tape tape;
  Var x = tape.leaf(random_tensor({2, 3}, "x"));
  linear(tape, x, {{&idle}});
  Var y = linear(tape, x, {{&used}});
  tape.backward(y, random_tensor({2, 3}, "dy"));
  EXPECT_EQ(fired, 1);
  EXPECT_EQ(idle.grad.values<double>(), std::vector<double>(9, 0.0));
}

TEST(Tape, FreesEachEntryAsItIsReplayed) {
  std::vector<int64_t> held;
  Parameter w = parameter("w", {64, 64});
  Tape tape;
  Var x = tape.leaf(random_tensor({64, 64}, "x"));
  int64_t bytes = x.value.bytes();
  for (int i = 0; i < 3; ++i) {
    tape.mark("meter", [&] { held.push_back(memory_account()->now(Category::Activations)); });
    x = linear(tape, x, {{&w}});
  }
  tape.backward(std::exchange(x, {}), random_tensor({64, 64}, "dy"));
  ASSERT_EQ(held.size(), 3u);
  EXPECT_EQ(held[0] - held[1], bytes);  // one saved input less with every entry
  EXPECT_EQ(held[1] - held[2], bytes);
}

TEST(Tape, IsReplayedOnce) {
  Tape tape;
  Var x = tape.leaf(random_tensor({2, 3}, "x"));
  tape.backward(x, x.value);
  EXPECT_THROW(tape.backward(x, x.value), Error);
  EXPECT_THROW(add(tape, x, x), Error);
}

}  // namespace
}  // namespace lockstep
