// What a rank of tensor parallelism keeps, to the byte, and which shapes it has where.

#include "04_tensor_parallel/activations.h"
#include "04_tensor_parallel/shapes.h"
#include "tests/lone_rank.h"
#include "tests/temporary.h"
#include "tests/tensor_parallel_cases.h"

namespace lockstep {
namespace {

// Activations of one rank at the end of forward.
int64_t stored(const LayoutRig::Settings& s, Cut tp, BatchShape shape) {
  auto account = std::make_shared<MemoryAccount>();
  std::swap(memory_account(), account);
  int64_t bytes = 0;
  {
    LoneRank world(tp.rank, tp.size, "tp");
    ProcessMesh mesh(world, {.tp = tp.size}, tp.size);
    LayoutRig rig(s, mesh);
    MicroBatch batch = random_batch(shape.sequences, shape.length, s.config.vocab, 1);
    rig.parallel->begin_step(1);
    rig.optimizer->begin_step(Tensor::from<int64_t>({1}, {1}, Device::CPU, Category::Buffers));
    Tape tape;
    Var loss =
        rig.model->loss(tape, rig.model->forward(tape, batch), batch, rig.optimizer->scale());
    bytes = memory_account()->now(Category::Activations);
    tape.backward(loss, rig.one);
    loss = {};
    EXPECT_EQ(memory_account()->now(Category::Activations), 0);
  }
  std::swap(memory_account(), account);
  return bytes;
}

TEST(TensorParallelMemory, ActivationsOfEveryRankAreThoseOfTheFormula) {
  const BatchShape shape{2, 24};
  for (const Variant& variant : kVariants)
    for (DType compute : {DType::F32, DType::BF16})
      for (size_t model : {0, 1, 6, 7, 14})  // with dropout, too: masks are not kept
        for (int ranks : {1, 2, 4, 8})
          for (int rank = 0; rank < ranks; ++rank) {
            SCOPED_TRACE(text(variant.name, " ", name_of(compute), " ", model_number(model).name(),
                              " rank ", rank, " of TP", ranks));
            TensorCase c{ranks, 1, variant, Sync::Naive, model_number(model)};
            LayoutRig::Settings s = settings_of(c);
            s.compute = compute;
            Cut tp{rank, ranks};
            RankActivations want = rank_activations(s.config, shape, compute, tp, variant.how);
            EXPECT_EQ(stored(s, tp, shape), want.stored);
            if (ranks > 1) continue;
            ActivationMemory one = activation_memory(s.config, shape, compute, Recompute::None);
            EXPECT_EQ(want.block, one.block);
            EXPECT_EQ(want.head, one.head);
          }
}

// The activations of the source's claim, b s h / N: with sequence parallelism, and gathering again,
// a block leaves an N-th on each rank.
TEST(TensorParallelMemory, T6_SequenceParallelismDividesWhatTensorParallelismRepeats) {
  ModelConfig c = TensorModel{}.config();
  c.ffn = 32, c.vocab = 24;
  const BatchShape shape{2, 24};
  const int64_t tokens = shape.tokens(), stream = tokens * c.hidden * 4, norms = 2 * tokens * 4;
  auto block = [&](int ranks, const Variant& v) {
    return rank_activations(c, shape, DType::F32, {0, ranks}, v.how).block;
  };
  const int64_t one = block(1, kVariants[0]);
  for (int64_t n : {2, 4, 8}) {
    EXPECT_EQ(block(int(n), kVariants[0]), (one - 4 * stream - norms) / n + 4 * stream + norms);
    EXPECT_EQ(block(int(n), kVariants[1]), (one - 2 * stream) / n + 2 * stream);
    EXPECT_EQ(block(int(n), kVariants[2]), one / n);
    EXPECT_EQ(block(int(n), kVariants[3]), block(int(n), kVariants[1]));
  }
}

TEST(TensorParallelMemory, TheSourcesFormula) {
  // GPT-3 175B: 96 layers, s 2048, b 1, h 12288, a 96.
  auto bytes = [](double n, bool sp) {
    return source_rank_activations(96, 2048, 1, 12288, 96, n, sp);
  };
  double one = source_activation_bytes(96, 2048, 1, 12288, 96, Recompute::None);
  EXPECT_DOUBLE_EQ(bytes(1, false), one);
  EXPECT_DOUBLE_EQ(bytes(1, true), one);
  EXPECT_DOUBLE_EQ(bytes(8, true), one / 8);
  EXPECT_DOUBLE_EQ(bytes(8, false), 96.0 * 2048 * 12288 * (10 + 3 + 10));
  EXPECT_NEAR(bytes(1e9, false) / one, 10.0 / 114, 1e-6);  // what more ranks do not help with
}

// A 70B model at TP16, one sequence of 16,384 tokens, attention's matrix not kept: 70 GB of model
// and 23 GB of activations with sequence parallelism, 123 GB without. An H200 has 141.
TEST(TensorParallelMemory, T11_SeventyBillionWithSixteenThousandTokensOnSixteenRanks) {
  const double model = 70e9 * 16 / 16, h200 = 141e9;
  auto total = [&](bool sp) {
    return model + source_rank_activations(80, 16384, 1, 8192, 0, 16, sp);
  };
  EXPECT_NEAR(total(true) / 1e9, 70 + 22.8, 0.1);
  EXPECT_LT(total(true), h200);
  EXPECT_GT(total(false), h200);
}

TEST(TensorParallelMemory, T6_EveryRegionHasTheShapeOfTheTable) {
  for (const Variant& variant : kVariants)
    for (size_t model = 0; model < kModels; model += 5)
      for (int ranks : {1, 2, 4, 8}) {
        TensorCase c{ranks, 1, variant, Sync::Naive, model_number(model)};
        LayoutRig::Settings s = settings_of(c);
        std::vector<std::unique_ptr<ShapeTable>> tables{size_t(ranks)};
        for (int r = 0; r < ranks; ++r)
          tables[size_t(r)] = std::make_unique<ShapeTable>(s.config, variant.how, Cut{r, ranks});
        s.more = [&](Parts& parts) { watch_shapes(parts, *tables[size_t(parts.tp.rank)]); };
        EXPECT_NO_THROW(train(c.shape(), s, 1, 1)) << c.name();
        // Beside the table of the other kind, the run stops in its first block.
        if (ranks == 1) continue;
        TensorParallel other{.sequence_parallel = !variant.how.sequence_parallel};
        for (int r = 0; r < ranks; ++r)
          *tables[size_t(r)] = ShapeTable(s.config, other, Cut{r, ranks});
        expect_refusal([&] { train(c.shape(), s, 1, 1); },
                       {text("of TP", ranks), "into a column-linear, which should be"});
      }
}

}  // namespace
}  // namespace lockstep
