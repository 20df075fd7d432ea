// Recomputation gives the same bits, and saves what the formulas say.

#include "01_single_gpu/recompute.h"

#include <gtest/gtest.h>

#include "common/memory_model.h"
#include "tests/rig.h"

namespace lockstep {
namespace {

constexpr Recompute kKinds[] = {Recompute::None, Recompute::Selective, Recompute::Full};

Parts parts_with(Recompute kind) {
  Parts parts = plain_parts();
  use_recomputation(parts, kind);
  return parts;
}

std::vector<Device> devices() {
  std::vector<Device> all = {Device::CPU};
  if (device::available()) all.push_back(Device::CUDA);
  return all;
}

struct Result {
  double loss;
  std::vector<std::vector<double>> gradients;
  bool operator==(const Result&) const = default;
};

Result run(const Rig::Settings& s, Recompute kind) {
  Rig rig(s, parts_with(kind));
  rig.gradients({random_batch(3, 16, s.config.vocab, 1, 5, s.device),
                 random_batch(2, 16, s.config.vocab, 2, 0, s.device)});
  Result result{rig.state().loss, {}};
  for (const Owned& o : rig.parallel.owned()) result.gradients.push_back(doubles(o.grad));
  return result;
}

TEST(Recomputation, S9_GradientsAreBitwiseTheSame) {
  for (Device device : devices()) {
    for (DType compute : {DType::F32, DType::BF16}) {
      Rig::Settings s;
      s.compute = compute;
      s.device = device;
      s.config.attention_bias = s.config.mlp_bias = true;
      Result plain = run(s, Recompute::None);
      EXPECT_EQ(run(s, Recompute::Selective), plain);
      EXPECT_EQ(run(s, Recompute::Full), plain);
    }
  }
}

TEST(Recomputation, Pitfall7_DropoutDrawsTheSameMaskAgain) {
  for (Device device : devices()) {
    Rig::Settings s;
    s.device = device;
    s.config.dropout = 0.5;
    Result plain = run(s, Recompute::None);
    EXPECT_EQ(run(s, Recompute::Full), plain);
    EXPECT_EQ(run(s, Recompute::Selective), plain);
    s.config.dropout = 0;
    EXPECT_NE(run(s, Recompute::None), plain);  // the masks did something
  }
}

TEST(Recomputation, HooksFireOncePerTapeAndWeightWorkMayComeLater) {
  Rig::Settings s;
  Rig now(s, parts_with(Recompute::Full)), later(s, parts_with(Recompute::Full));
  MicroBatch batch = random_batch(2, 8, s.config.vocab, 1);
  now.gradients({batch});
  std::map<std::string, int> fired;
  for (Parameter* p : later.model.parameters())
    p->on_grad_ready = [&](Parameter& q) { ++fired[q.name]; };
  later.parallel.begin_step(1);
  later.optimizer->begin_step(later.valid({batch}));
  Tape tape;
  Var loss =
      later.model.loss(tape, later.model.forward(tape, batch), batch, later.optimizer->scale());
  tape.backward(loss, later.one, Tape::WeightWork::Later);
  tape.weight_work();
  auto a = now.parallel.owned(), b = later.parallel.owned();
  for (size_t i = 0; i < a.size(); ++i) EXPECT_EQ(doubles(a[i].grad), doubles(b[i].grad));
  EXPECT_EQ(fired.size(), a.size());
  for (const auto& [name, count] : fired) EXPECT_EQ(count, 1) << name;
}

struct Measured {
  int64_t kept, peak;
};

Measured measure(Rig& rig, BatchShape shape) {
  MicroBatch batch = random_batch(shape.sequences, shape.length, rig.settings.config.vocab, 1, 0,
                                  rig.settings.device);
  rig.gradients({batch});  // once before: nothing that is made on first use is counted
  Tensor valid = rig.valid({batch});
  rig.parallel.begin_step(1);
  rig.optimizer->begin_step(valid);
  memory_account()->reset_peaks();
  int64_t before = memory_account()->now(Category::Activations);
  Tape tape;
  Var loss = rig.model.loss(tape, rig.model.forward(tape, batch), batch, rig.optimizer->scale());
  Measured m{memory_account()->now(Category::Activations) - before, 0};
  tape.backward(loss, rig.one);
  m.peak = memory_account()->peak(Category::Activations) - before;
  return m;
}

// Shapes in which each part weighs: wide vocabulary, long sequence, wide feed-forward, many layers.
TEST(Recomputation, ActivationBytesAreThePredictedOnes) {
  struct Case {
    int64_t layers, hidden, heads, kv, ffn, vocab, sequences, length;
  };
  for (Device device : devices()) {
    for (Case c : {Case{2, 32, 4, 4, 64, 500, 2, 16}, Case{3, 32, 4, 2, 64, 50, 1, 96},
                   Case{2, 32, 2, 1, 256, 40, 2, 32}, Case{8, 16, 4, 4, 48, 30, 4, 24}}) {
      for (DType compute : {DType::F32, DType::BF16}) {
        for (Recompute kind : kKinds) {
          Rig::Settings s;
          s.config.layers = c.layers, s.config.hidden = c.hidden, s.config.heads = c.heads;
          s.config.kv_heads = c.kv, s.config.head_dim = c.hidden / c.heads;
          s.config.ffn = c.ffn, s.config.vocab = c.vocab;
          s.compute = compute;
          s.device = device;
          Rig rig(s, parts_with(kind));
          BatchShape shape{c.sequences, c.length};
          Measured m = measure(rig, shape);
          ActivationMemory want = activation_memory(s.config, shape, compute, kind);
          std::string where = text("layers ", c.layers, " ffn ", c.ffn, " vocab ", c.vocab, " ",
                                   name_of(compute), " recompute ", int(kind));
          EXPECT_EQ(m.kept, want.stored) << where;
          EXPECT_NEAR(double(m.peak), double(want.peak), 0.05 * double(want.peak)) << where;
        }
      }
    }
  }
}

TEST(Recomputation, S5_ActivationsGrowLinearlyWithBatchAndQuadraticallyWithSequence) {
  // the source's formula, for a 7B shape: h 4096, 32 heads, 32 layers
  auto source = [](double s, double b) {
    return source_activation_bytes(32, s, b, 4096, 32, Recompute::None);
  };
  EXPECT_DOUBLE_EQ(source(2048, 4), 4 * source(2048, 1));
  EXPECT_DOUBLE_EQ(source(2048, 1), 32.0 * 2048 * 4096 * (34 + 5 * 32 * 2048.0 / 4096));
  EXPECT_GT(source(65536, 1) / source(32768, 1), 3.9);  // the square takes over
  // beside 16 bytes for each of 7e9 weights: small at 1k tokens, as much as them from 4k on
  EXPECT_LT(source(1024, 1), 0.15 * 16 * 7e9);
  EXPECT_GT(source(4096, 4), 16 * 7e9);
  // and what this model measures
  Rig::Settings s;
  Rig rig(s);
  int64_t once = measure(rig, {1, 16}).kept, twice = measure(rig, {2, 16}).kept;
  EXPECT_EQ(twice - once, once - 4);  // all but the loss itself
  auto kept = [&](int64_t length) { return double(measure(rig, {1, length}).kept); };
  double square = kept(64) - 2 * kept(32);  // what is linear in the sequence cancels
  EXPECT_NEAR(square, 2 * 4 * 4 * (64 * 64 - 2 * 32 * 32), 16);  // layers, heads, bytes
}

// Two of a weight's six operations per token run once more; the head's and the embedding's do not.
TEST(Recomputation, S9_FullRecomputationAddsAboutAThird) {
  ModelConfig c;
  c.hidden = 2048, c.layers = 24, c.heads = c.kv_heads = 32, c.head_dim = 64, c.ffn = 8192;
  c.vocab = 49152;
  double more = hardware_flops_per_token(c, 2048, Recompute::Full) / model_flops_per_token(c, 2048);
  EXPECT_NEAR(more, 1.30, 0.02);
  EXPECT_LT(
      hardware_flops_per_token(c, 2048, Recompute::Selective) / model_flops_per_token(c, 2048),
      1.05);
}

TEST(Recomputation, S10_SelectiveSavesSeventyPercentOfGpt3) {
  double heads = 96, length = 2048, hidden = 12288;
  EXPECT_NEAR(5 * heads * length / hidden, 80, 1e-12);
  EXPECT_NEAR(selective_saving(heads, length, hidden), 0.702, 0.001);
  EXPECT_NEAR(attention_share(length, hidden), 0.0270, 0.0001);
  EXPECT_NEAR(one_more_forward(length, hidden), 0.0090, 0.0001);
}

// The same pair on this model, counted in bytes that are kept and in products that are run.
TEST(Recomputation, S10_TheSamePairMeasuredOnThisModel) {
  Rig::Settings s;
  s.config.hidden = 64, s.config.heads = 8, s.config.kv_heads = 8, s.config.head_dim = 8;
  s.config.ffn = 128;
  BatchShape shape{2, 64};
  auto block = [&](Recompute kind) {
    return double(activation_memory(s.config, shape, s.compute, kind).block);
  };
  Rig plain(s), selective(s, parts_with(Recompute::Selective));
  double head = double(activation_memory(s.config, shape, s.compute, Recompute::None).head);
  double saved = 1 - (double(measure(selective, shape).kept) - head) /
                         (double(measure(plain, shape).kept) - head);
  EXPECT_NEAR(saved, 1 - block(Recompute::Selective) / block(Recompute::None), 1e-9);
  EXPECT_GT(saved, 0.3);

  // attention runs again, and nothing else does
  static int64_t attentions, products;
  Kernels& k = kernels(Device::CPU);
  static Kernels before = k;
  k.attention = [](const Tensor& out, const Tensor& probs, const Tensor& qkv,
                   const AttentionShape& a) {
    ++attentions;
    before.attention(out, probs, qkv, a);
  };
  k.matmul = [](const Tensor& c, const Tensor& a, Op ta, const Tensor& b, Op tb, float beta) {
    ++products;
    before.matmul(c, a, ta, b, tb, beta);
  };
  auto counts = [&](Recompute kind) {
    Rig rig(s, parts_with(kind));
    attentions = products = 0;
    rig.gradients({random_batch(2, 64, s.config.vocab, 1)});
    return std::pair(attentions, products);
  };
  auto none = counts(Recompute::None), again = counts(Recompute::Selective),
       all = counts(Recompute::Full);
  k = before;
  EXPECT_EQ(none.first, s.config.layers);
  EXPECT_EQ(again.first, 2 * s.config.layers);
  EXPECT_EQ(again.second, none.second);
  EXPECT_EQ(all.first, 2 * s.config.layers);
  EXPECT_EQ(all.second, none.second + 4 * s.config.layers);  // qkv, o, gate|up, down
}

}  // namespace
}  // namespace lockstep
