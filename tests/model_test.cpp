// Counting: parameters, bytes and operations from formulas, against the model that is built.

#include <gtest/gtest.h>

#include "common/formulas.h"
#include "common/options.h"
#include "common/memory_model.h"
#include "tests/rig.h"

namespace lockstep {
namespace {

TEST(Model, S2_BatchIsCountedInTokens) {
  EXPECT_EQ(batch_tokens(1024, 4096), 4 << 20);  // a "4M" batch
  Options o;
  o.sequence = 4096;
  o.micro_batch = 2;
  o.batch_tokens = 4 << 20;
  EXPECT_EQ(o.batch_sequences(), 1024);
  EXPECT_EQ(o.accumulation(), 512);
  // Llama 1 saw 1.4T tokens in batches of 4M, DeepSeek-V3 14T in batches of up to 60M
  EXPECT_EQ(int64_t(1.4e12) / int64_t(4e6), 350000);
  EXPECT_EQ(accumulation_for(int64_t(60) << 20, 4, 4096), 3840);
}

TEST(Model, S3_GptFormula) {
  // GPT-2 small has 124,439,808 weights with its 1024 learned positions; the formula counts none
  EXPECT_EQ(gpt_parameters(768, 50257, 12) + 1024 * 768, 124439808);
  EXPECT_EQ(gpt_parameters(1600, 50257, 48) + 1024 * 1600, 1557611200);   // GPT-2 XL
  EXPECT_NEAR(double(gpt_parameters(12288, 50257, 96)), 174.6e9, 0.1e9);  // GPT-3
}

TEST(Model, S3_LlamaCountEqualsTheBuiltModel) {
  std::vector<ModelConfig> configs = {preset("tiny"), preset("135M"), preset("360M"),
                                      small_config()};
  configs[0].vocab = 256;
  configs.push_back(small_config());
  configs.back().tied = configs.back().attention_bias = configs.back().mlp_bias = true;
  for (const ModelConfig& c : configs) {
    Stage stage(c, plain_parts(), DType::F32, Device::CPU);
    int64_t built = 0;
    for (Parameter* p : stage.parameters()) built += p->size();
    EXPECT_EQ(built, c.parameters());
  }
  EXPECT_EQ(preset("1.7B").parameters(), 1812039680);
}

TEST(Model, S4_BytesPerParameterTable) {
  auto gigabytes = [](double billions, Precision p) {
    return double(training_bytes(int64_t(billions * 1e9), p)) / 1e9;
  };
  struct Row {
    double billions, sixteen, twenty;
  };
  for (Row row : {Row{1, 16, 20}, Row{7, 112, 140}, Row{70, 1120, 1400}, Row{405, 6480, 8100}}) {
    EXPECT_EQ(gigabytes(row.billions, Precision::Fp32), row.sixteen);
    EXPECT_EQ(gigabytes(row.billions, Precision::Bf16), row.sixteen);
    EXPECT_EQ(gigabytes(row.billions, Precision::Bf16PlusFp32Grad), row.twenty);
  }
  EXPECT_GT(gigabytes(7, Precision::Bf16), 80);  // more than one H100 holds
}

TEST(Model, S4_MeasuredBytesEqualTheFormula) {
  struct Case {
    DType compute, gradients;
    int64_t per_parameter;
  };
  for (Case c : {Case{DType::F32, DType::F32, 16}, Case{DType::BF16, DType::BF16, 16},
                 Case{DType::BF16, DType::F32, 18}}) {
    auto account = std::make_shared<MemoryAccount>();
    std::swap(memory_account(), account);
    {
      Rig::Settings s;
      s.compute = c.compute;
      s.gradients = c.gradients;
      Rig rig(s);
      rig.step({random_batch(2, 6, s.config.vocab, 1)});
      int64_t n = s.config.parameters();
      ModelMemory m = model_memory(n, c.compute, c.gradients);
      EXPECT_EQ(memory_account()->now(Category::Weights), m.weights);
      EXPECT_EQ(memory_account()->now(Category::Gradients), m.gradients);
      EXPECT_EQ(memory_account()->now(Category::Master), m.master);
      EXPECT_EQ(memory_account()->now(Category::Moments), m.moments);
      EXPECT_EQ(m.total(), c.per_parameter * n);
      EXPECT_EQ(memory_account()->now(Category::Activations), 0);
    }
    std::swap(memory_account(), account);
    EXPECT_EQ(account->now(), 0);
  }
}

TEST(Model, C17_TypicalSizes) {
  TypicalSizes t = typical_sizes(4096, 2, 1024);
  EXPECT_EQ(t.tokens, 8192);
  EXPECT_EQ(t.hidden_state, 8192 * 1024);
  EXPECT_EQ(t.weight, 1 << 20);
  EXPECT_EQ(t.optimizer, 2 << 20);
  EXPECT_EQ(t.master, 1 << 20);
  EXPECT_EQ(block_parameters(1024, true), 16 << 20);
  EXPECT_EQ(block_parameters(1024, false), 12 << 20);
  // the same from a built model with a gated feed-forward of 4h: matrices only
  ModelConfig c = small_config();
  c.layers = 1;
  c.kv_heads = c.heads;
  c.ffn = 4 * c.hidden;
  Stage stage(c, plain_parts(), DType::F32, Device::CPU);
  int64_t block = 0, embedding = 0;
  for (Parameter* p : stage.parameters()) {
    if (p->shard.whole.size() == 2 && p->name.find("layers") != std::string::npos)
      block += p->size();
    if (p->name == "model.embed_tokens.weight") embedding = p->size();
  }
  EXPECT_EQ(block, block_parameters(c.hidden, true));
  EXPECT_EQ(embedding, c.vocab * c.hidden);
}

// Multiplications of every matmul are counted while a step runs.
int64_t g_products = 0;

TEST(Model, C18_Flops) {
  EXPECT_EQ(forward_flops(10, 7), 140);
  EXPECT_EQ(backward_flops(10, 7), 280);
  EXPECT_EQ(sequence_flops(8, 100, 3, 4), 6 * 8 * 100 + 12 * 3 * 4 * 64);

  // the matmuls that really run in one step: 2 per weight and token forward, 4 backward. Embedding
  // and gains multiply nothing; attention's products are counted by the formula's second term.
  Kernels& k = kernels(Device::CPU);
  static auto plain = k.matmul;
  k.matmul = [](const Tensor& c, const Tensor& a, Op ta, const Tensor& b, Op tb, float beta) {
    g_products += 2 * c.size() * a.dim(ta == Op::N ? 1 : 0);
    plain(c, a, ta, b, tb, beta);
  };
  Rig::Settings s;
  Rig rig(s);
  g_products = 0;
  rig.gradients({random_batch(2, 6, s.config.vocab, 1)});
  k.matmul = plain;
  int64_t matrices = 0;
  for (Parameter* p : rig.model.parameters())
    if (p->shard.whole.size() == 2 && p->name != "model.embed_tokens.weight") matrices += p->size();
  EXPECT_EQ(double(g_products),
            forward_flops(12, double(matrices)) + backward_flops(12, double(matrices)));
}

TEST(Model, InitialWeightsDependOnSeedAndNameOnly) {
  Rig a({.seed = 5}), b({.seed = 5}), c({.seed = 6});
  auto owned_a = a.parallel.owned(), owned_b = b.parallel.owned(), owned_c = c.parallel.owned();
  for (size_t i = 0; i < owned_a.size(); ++i) {
    EXPECT_EQ(doubles(owned_a[i].master), doubles(owned_b[i].master));
    if (!owned_a[i].parameter->decays()) continue;
    EXPECT_NE(doubles(owned_a[i].master), doubles(owned_c[i].master));
  }
}

TEST(Model, ShardsHoldTheNumbersOfTheWholeTensor) {
  Tensor whole = Tensor::empty({6, 10}, DType::F32, Device::CPU);
  RandomStream stream(1, "w");
  on(whole).fill_normal(whole, 1, stream, {}, 0);
  for (int dim : {0, 1}) {
    Shard shard = cut_shard({6, 10}, dim, share(dim == 0 ? 6 : 10, {1, 4}));
    Tensor local = Tensor::empty(shard.local, DType::F32, Device::CPU);
    on(local).fill_normal(local, 1, stream, shard.index_map(), 0);
    for (int64_t i = 0; i < local.size(); ++i)
      EXPECT_EQ(local.data<float>()[i], whole.data<float>()[shard.whole_index(i)]);
  }
}

}  // namespace
}  // namespace lockstep
