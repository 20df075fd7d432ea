// The training step: losses and gradients however a batch is cut, clipping, AdamW, the schedule.

#include <gtest/gtest.h>

#include "common/options.h"
#include "tests/gradient_check.h"
#include "tests/rig.h"

namespace lockstep {
namespace {

std::vector<std::vector<double>> all_gradients(const Rig& rig) {
  std::vector<std::vector<double>> all;
  for (const Owned& o : rig.parallel.owned()) all.push_back(doubles(o.grad));
  return all;
}

std::vector<std::vector<double>> all_masters(const Rig& rig) {
  std::vector<std::vector<double>> all;
  for (const Owned& o : rig.parallel.owned()) all.push_back(doubles(o.master));
  return all;
}

void expect_close(const Rig& rig, const std::vector<std::vector<double>>& got,
                  const std::vector<std::vector<double>>& want, double tolerance) {
  auto owned = rig.parallel.owned();
  ASSERT_EQ(got.size(), want.size());
  for (size_t i = 0; i < got.size(); ++i)
    EXPECT_LE(relative_error(got[i], want[i]), tolerance) << owned[i].parameter->name;
}

TEST(Training, S1_OverfitsOneBatch) {
  Rig::Settings s;
  s.rule.schedule = {.peak = 1e-2, .floor = 1, .warmup = 0, .total = 0};
  s.rule.weight_decay = 0;
  Rig rig(s);
  MicroBatch batch = random_batch(2, 12, s.config.vocab, 1);
  rig.step({batch});
  double first = rig.state().loss;
  for (int i = 0; i < 150; ++i) rig.step({batch});
  EXPECT_GT(first, 2.5);  // about ln 20
  EXPECT_LT(rig.state().loss, 0.02);
}

TEST(Training, S12_ResultDoesNotDependOnTheNumberOfMicroSteps) {
  constexpr int64_t kLength = 6, kSequences = 8;
  Rig::Settings s;
  MicroBatch all = random_batch(kSequences, kLength, s.config.vocab, 1, 5);
  std::vector<int32_t> inputs = all.inputs.values<int32_t>(),
                       targets = all.targets.values<int32_t>();
  auto cut = [&](int64_t parts) {
    std::vector<MicroBatch> out;
    int64_t rows = kSequences * kLength / parts;
    for (int64_t i = 0; i < parts; ++i) {
      auto from = i * rows, to = from + rows;
      out.push_back(micro_batch({inputs.begin() + from, inputs.begin() + to},
                                {targets.begin() + from, targets.begin() + to},
                                kSequences / parts));
    }
    return out;
  };
  Rig whole(s);
  whole.gradients(cut(1));
  auto want = all_gradients(whole);
  std::vector<int64_t> activations;
  for (int64_t parts : {2, 4, 8}) {
    Rig rig(s);
    memory_account()->reset_peaks();
    int64_t before = memory_account()->now(Category::Activations);
    std::vector<MicroBatch> batches = cut(parts);
    batches.resize(size_t(std::min<int64_t>(parts, 2)));  // memory: two micro-batches say it all
    rig.gradients(batches);
    activations.push_back(memory_account()->peak(Category::Activations) - before);
    rig.gradients(cut(parts));
    EXPECT_NEAR(rig.state().loss, whole.state().loss, 1e-6);
    expect_close(rig, all_gradients(rig), want, 1e-5);
  }
  EXPECT_GT(activations[0], activations[1]);  // smaller micro-batches take less
  Rig rig(s);
  auto peak_of = [&](int64_t micro_steps) {
    std::vector<MicroBatch> batches(size_t(micro_steps), cut(8)[0]);
    memory_account()->reset_peaks();
    rig.gradients(batches);
    return memory_account()->peak(Category::Activations);
  };
  EXPECT_EQ(peak_of(2), peak_of(16));                   // and more of them take no more
  EXPECT_EQ(accumulation_for(8 * 2 * 128, 2, 128), 8);  // gbs = mbs x accumulation
}

// Logits of two tokens whose loss is exactly `loss`: log(1 + e^x) with x = log(e^loss - 1).
std::vector<double> logits_for(const std::vector<double>& losses) {
  std::vector<double> logits;
  for (double l : losses) {
    logits.push_back(0);
    logits.push_back(std::log(std::exp(l) - 1));
  }
  return logits;
}

TEST(Training, Pitfall1_LossIsDividedOnceByAllValidTokens) {
  Tensor scale = Tensor::from<double>({0.25}, {1});
  auto loss_of = [&](const std::vector<double>& losses) {
    Tape tape(Tape::Mode::Forget);
    int64_t n = int64_t(losses.size());
    Tensor logits = Tensor::from(logits_for(losses), {n, 2});
    Tensor targets = Tensor::from(std::vector<int32_t>(losses.size(), 0), {n});
    return cross_entropy(tape, {logits}, targets, scale).value.values<double>()[0];
  };
  EXPECT_NEAR(loss_of({1, 2, 3, 10}), 4.0, 1e-12);
  EXPECT_NEAR(loss_of({1, 2, 3}) + loss_of({10}), 4.0, 1e-12);  // the mean of means would be 6

  // The same through the model: 3 valid targets in one micro-batch, 1 in the other, against all
  // four.
  Rig::Settings s;
  std::vector<int32_t> inputs = {1, 2, 3, 4, 5, 6, 7, 8}, targets = {2, 3, 4, -1, -1, 9, -1, -1};
  Rig whole(s), two(s);
  whole.gradients({micro_batch(inputs, targets, 2)});
  two.gradients(
      {micro_batch({1, 2, 3, 4}, {2, 3, 4, -1}, 1), micro_batch({5, 6, 7, 8}, {-1, 9, -1, -1}, 1)});
  EXPECT_NEAR(two.state().loss, whole.state().loss, 1e-6);
  expect_close(two, all_gradients(two), all_gradients(whole), 1e-5);
}

TEST(Training, Pitfall2_MicroBatchWithoutValidTokens) {
  Rig::Settings s;
  MicroBatch a = random_batch(1, 6, s.config.vocab, 1), b = random_batch(1, 6, s.config.vocab, 2);
  MicroBatch empty = random_batch(1, 6, s.config.vocab, 3, 1);  // every target ignored
  Rig with(s), without(s);
  with.gradients({a, empty, b});
  without.gradients({a, b});
  EXPECT_TRUE(std::isfinite(with.state().loss));
  expect_close(with, all_gradients(with), all_gradients(without), 1e-6);

  auto before = all_masters(with);
  with.step({empty, empty, empty, empty});
  EXPECT_EQ(with.state().loss, 0);
  EXPECT_EQ(with.state().skip, 1);
  EXPECT_EQ(with.state().updates, 0);
  EXPECT_EQ(with.state().stopped, 0);
  EXPECT_EQ(all_masters(with), before);  // not even weight decay
  with.step({a});
  EXPECT_EQ(with.state().updates, 1);
  EXPECT_NE(all_masters(with), before);
}

TEST(Training, NonFiniteGradientStopsEveryLaterUpdate) {
  Rig::Settings s;
  Rig rig(s);
  rig.step({random_batch(1, 6, s.config.vocab, 1)});
  auto before = all_masters(rig);
  rig.gradients({random_batch(1, 6, s.config.vocab, 1)});
  rig.parallel.owned()[3].grad.data<float>()[1] = INFINITY;
  rig.optimizer->step();
  EXPECT_EQ(rig.state().stopped, 1);
  EXPECT_EQ(all_masters(rig), before);
  rig.step({random_batch(1, 6, s.config.vocab, 2)});  // launched before the host could know
  EXPECT_EQ(all_masters(rig), before);
  EXPECT_EQ(rig.state().updates, 1);
}

TEST(Training, Pitfall5_EveryParameterHasTheGradientOfTheLoss) {
  Rig::Settings s;
  s.config.layers = 1;
  s.config.hidden = 8;
  s.config.head_dim = 2;
  s.config.ffn = 6;
  s.config.vocab = 10;
  s.config.attention_bias = s.config.mlp_bias = true;
  s.config.dropout = 0.2;
  s.compute = DType::F64;
  MicroBatch batch = random_batch(2, 5, 10, 1, 4);
  for (bool tied : {false, true}) {
    s.config.tied = tied;
    Rig rig(s);
    for (const Owned& o : rig.parallel.owned())  // gains of 1 and biases of 0 would hide mistakes
      on(o.master).fill_normal(o.master, 0.4f, RandomStream(1, o.parameter->name), {}, 0);
    rig.gradients({batch});
    auto loss = [&] {
      Tape tape(Tape::Mode::Forget);
      return rig.model.loss(tape, rig.model.forward(tape, batch), batch, rig.optimizer->scale())
          .value.values<double>()[0];
    };
    size_t tensors = 0;
    for (Parameter* p : rig.model.parameters()) {
      expect_matches_differences(p->name, p->value, p->grad, loss, 1e-5);
      ++tensors;
    }
    EXPECT_EQ(tensors, tied ? 18u : 19u);  // embedding, 2 + 1 gains, 7 matrices, 7 biases, head
    EXPECT_EQ(tensors, rig.parallel.owned().size());
  }
}

TEST(Training, Pitfall8_GainsAndBiasesDoNotDecay) {
  Rig::Settings s;
  s.config.attention_bias = s.config.mlp_bias = true;
  s.rule.schedule = {.peak = 0.1, .floor = 1, .warmup = 0, .total = 0};
  s.rule.weight_decay = 0.1f;
  Rig rig(s);
  auto before = all_masters(rig);
  rig.parallel.begin_step(1);
  rig.optimizer->begin_step(Tensor::from<int64_t>({1}, {1}));
  rig.optimizer->step();
  auto after = all_masters(rig);
  auto owned = rig.parallel.owned();
  int matrices = 0, others = 0;
  for (size_t i = 0; i < owned.size(); ++i) {
    const std::string& name = owned[i].parameter->name;
    bool gain = name.find("norm") != std::string::npos,
         bias = name.find("bias") != std::string::npos;
    for (size_t k = 0; k < after[i].size(); ++k) {
      if (gain) {
        EXPECT_EQ(after[i][k], 1.0) << name;
      } else if (bias) {
        EXPECT_EQ(after[i][k], 0.0) << name;
      } else {
        EXPECT_NEAR(after[i][k], before[i][k] * 0.99, 1e-7) << name;
      }
    }
    (gain || bias ? others : matrices) += 1;
  }
  EXPECT_EQ(matrices, 2 + 2 * 7);
  EXPECT_EQ(others, 2 * 2 + 1 + 2 * 7);
}

// k, the number of optimizer updates, starts at 1; micro-batches do not appear.
TEST(Training, Pitfall9_ScheduleCountsOptimizerSteps) {
  for (int accumulation : {1, 4}) {
    Rig::Settings s;
    s.rule.schedule = {.peak = 1e-3, .floor = 0.1, .warmup = 10, .total = 0};
    Rig rig(s);
    std::vector<MicroBatch> batches(size_t(accumulation), random_batch(1, 4, s.config.vocab, 1));
    for (int k = 1; k <= 10; ++k) {
      rig.step(batches);
      EXPECT_FLOAT_EQ(rig.state().learning_rate, float(1e-3 * k / 10));
      EXPECT_EQ(rig.state().updates, k);
    }
  }
  LearningRateSchedule cosine{.peak = 1, .floor = 0.1, .warmup = 10, .total = 110};
  EXPECT_DOUBLE_EQ(cosine.at(10), 1);
  EXPECT_NEAR(cosine.at(60), 0.55, 1e-12);
  EXPECT_NEAR(cosine.at(110), 0.1, 1e-12);
  EXPECT_NEAR(cosine.at(500), 0.1, 1e-12);
}

// 256 + 1 has no bf16 between 256 and 258: added one at a time, ones vanish. fp32 keeps them all.
TEST(Training, Pitfall10_SmallAddendsNeedAFp32Accumulator) {
  auto accumulated = [](DType gradients) {
    Parameter w = parameter("w", {1, 1}, 1, DType::BF16);
    w.grad = Tensor::zeros({1, 1}, gradients, Device::CPU);
    Tensor x = Tensor::from<bf16>({bf16(1)}, {1, 1});
    for (int i = 0; i <= 256; ++i) {
      Tape tape;
      Var y = linear(tape, {x}, {{&w}});
      tape.backward(y, Tensor::from<bf16>({bf16(i == 0 ? 256.0f : 1.0f)}, {1, 1}));
    }
    return doubles(w.grad)[0];
  };
  EXPECT_EQ(accumulated(DType::F32), 512.0);
  EXPECT_EQ(accumulated(DType::BF16), 256.0);
}

TEST(Training, ClipScalesByTheGlobalNorm) {
  Rig::Settings s;
  s.rule.max_norm = 1;
  Rig rig(s);
  rig.parallel.begin_step(1);
  auto owned = rig.parallel.owned();
  owned[0].grad.data<float>()[0] = 3;
  owned[5].grad.data<float>()[0] = 4;
  rig.optimizer->begin_step(Tensor::from<int64_t>({1}, {1}));
  rig.optimizer->step();
  EXPECT_DOUBLE_EQ(rig.state().gradient_norm, 5);
  EXPECT_FLOAT_EQ(rig.state().clip, 0.2f);
  EXPECT_FLOAT_EQ(rig.optimizer->moments()[0].m.data<float>()[0], 0.1f * 3 * 0.2f);
}

TEST(Training, Bf16KeepsFp32MastersAndRoundsThemOnce) {
  Rig::Settings s;
  s.compute = DType::BF16;
  Rig rig(s);
  for (int i = 0; i < 3; ++i) rig.step({random_batch(2, 6, s.config.vocab, 1)});
  for (const Owned& o : rig.parallel.owned()) {
    EXPECT_EQ(o.master.dtype(), DType::F32);
    EXPECT_EQ(o.value.dtype(), DType::BF16);
    for (int64_t i = 0; i < o.master.size(); ++i)
      EXPECT_EQ(o.value.data<bf16>()[i].bits, bf16(o.master.data<float>()[i]).bits);
  }
}

}  // namespace
}  // namespace lockstep
