// What tensor parallelism moves, from the ledger, against the formulas.

#include "common/parallel_formulas.h"
#include "tests/tensor_parallel_cases.h"

namespace lockstep {
namespace {

constexpr int64_t kSequencesHere = 4, kTokens = kSequencesHere * 8;

LayoutRig::Settings settings(const Variant& variant, int64_t layers, bool tied = false) {
  LayoutRig::Settings s =
      settings_of({1, 1, variant, Sync::Naive, {.tied = tied, .dropout = true}});
  s.config.layers = layers;
  return s;
}

// One micro-batch, in the phases forward, loss, backward, sum. A ledger for each rank.
std::vector<Ledger> run(int ranks, const LayoutRig::Settings& s) {
  std::vector<Ledger> ledgers{size_t(ranks)};
  std::vector<std::vector<LedgerEntry>> entries{size_t(ranks)};
  run_threads(ranks, Device::CPU, {.time_limit = 10}, [&](Communicator& world) {
    ProcessMesh mesh(world, {.tp = ranks}, s.config.kv_heads);
    LayoutRig rig(s, mesh);
    MicroBatch batch = random_batch(kSequencesHere, 8, s.config.vocab, 1);
    rig.parallel->begin_step(1);
    rig.optimizer->begin_step(Tensor::from<int64_t>({1}, {1}));
    world.ledger().clear();
    Tape tape;
    rig.phase("forward");
    Var hidden = rig.model->forward(tape, batch);
    rig.phase("loss");
    Var loss = rig.model->loss(tape, hidden, batch, rig.optimizer->scale());
    rig.phase("backward");
    tape.backward(loss, rig.one);
    rig.phase("sum");
    rig.parallel->finish();
    ledgers[size_t(world.rank())] = world.ledger();
    entries[size_t(world.rank())] = world.ledger().entries();
  });
  EXPECT_EQ(strict_order(entries), "");
  return ledgers;
}

// How often, and how much each time.
void expect_calls(const Ledger& ledger, const std::string& phase, Collective operation,
                  int64_t calls, int64_t payload_of_each) {
  Ledger::Sum sum = ledger.sum(operation, "tp", phase);
  EXPECT_EQ(sum.calls, calls) << phase << " " << name_of(operation);
  EXPECT_EQ(sum.payload, calls * payload_of_each) << phase << " " << name_of(operation);
}
int64_t wire(const Ledger& ledger, const std::vector<std::string>& phases) {
  int64_t bytes = 0;
  for (const LedgerEntry& e : ledger.entries())
    if (std::find(phases.begin(), phases.end(), e.phase) != phases.end()) bytes += e.wire;
  return bytes;
}
const std::vector<std::string> kOfTheModel = {"forward", "loss", "backward"};

// The loss: log-sum-exp and the target's logit from every rank, for every token.
int64_t statistics(int ranks) { return ranks * 2 * kTokens * 4; }

// The embedding adds one all-reduce forward (each token's row is on one rank), the head one
// backward (its input's gradient), the loss its statistics.
TEST(TensorParallelVolume, T4_TwoAllReducesForwardAndTwoBackwardInEveryLayer) {
  for (int64_t layers : {1, 3})
    for (bool tied : {false, true})
      for (int ranks : {2, 4, 8}) {
        SCOPED_TRACE(text("TP", ranks, ", ", layers, " layers"));
        LayoutRig::Settings s = settings(kVariants[0], layers, tied);
        const int64_t stream = kTokens * s.config.hidden * 4;
        for (const Ledger& ledger : run(ranks, s)) {
          expect_calls(ledger, "forward", Collective::AllReduce, 2 * layers + 1, stream);
          expect_calls(ledger, "loss", Collective::AllGather, 1, statistics(ranks));
          expect_calls(ledger, "backward", Collective::AllReduce, 2 * layers + 1, stream);
          EXPECT_EQ(ledger.sum(Collective::AllReduce, "tp", "sum").calls, 0);  // gains are whole
          EXPECT_EQ(int64_t(ledger.sum(Collective::AllReduce, "tp").calls) + 1,
                    std::count_if(ledger.entries().begin(), ledger.entries().end(),
                                  [](const LedgerEntry& e) { return e.group == "tp"; }));
          EXPECT_EQ(double(wire(ledger, kOfTheModel)),
                    4 * on_the_wire(tensor_volume(double(layers), kTokens, double(s.config.hidden)),
                                    ranks) +
                        double(wire_bytes(Collective::AllGather, statistics(ranks), ranks)));
        }
      }
}

TEST(TensorParallelVolume, T8_SequenceParallelismMovesTheSameBytesAsGathersAndScatters) {
  for (int64_t layers : {1, 3})
    for (int ranks : {2, 4, 8}) {
      SCOPED_TRACE(text("TP", ranks, ", ", layers, " layers"));
      std::vector<Ledger> plain = run(ranks, settings(kVariants[0], layers));
      LayoutRig::Settings s = settings(kVariants[1], layers);
      const int64_t stream = kTokens * s.config.hidden * 4;
      for (const Ledger& ledger : run(ranks, s)) {
        expect_calls(ledger, "forward", Collective::AllGather, 2 * layers, stream);
        expect_calls(ledger, "forward", Collective::ReduceScatter, 2 * layers + 1, stream);
        EXPECT_EQ(ledger.sum(Collective::AllGather, "tp", "loss").payload,
                  stream + statistics(ranks));
        EXPECT_EQ(ledger.sum(Collective::AllGather, "tp", "loss").calls, 2);
        expect_calls(ledger, "backward", Collective::AllGather, 2 * layers + 1, stream);
        expect_calls(ledger, "backward", Collective::ReduceScatter, 2 * layers + 1, stream);
        for (const char* phase : {"forward", "loss", "backward"})
          EXPECT_EQ(ledger.sum(Collective::AllReduce, "", phase).calls, 0);
        // Afterwards, and small: the gradients of the norms' gains are parts of a sum.
        expect_calls(ledger, "sum", Collective::AllReduce, 2 * layers + 1, s.config.hidden * 4);
        EXPECT_EQ(wire(ledger, kOfTheModel), wire(plain[0], kOfTheModel));
      }
    }
}

TEST(TensorParallelVolume, T8_GatheringAgainIsOneMoreAllGatherForEachColumnLinear) {
  for (int64_t layers : {1, 3})
    for (int ranks : {2, 4}) {
      std::vector<Ledger> kept = run(ranks, settings(kVariants[1], layers));
      LayoutRig::Settings s = settings(kVariants[2], layers);
      const int64_t stream = kTokens * s.config.hidden * 4, columns = 2 * layers + 1;  // the head
      for (const Ledger& ledger : run(ranks, s)) {
        expect_calls(ledger, "backward", Collective::AllGather, 2 * layers + 1 + columns, stream);
        EXPECT_EQ(wire(ledger, {"forward", "loss"}), wire(kept[0], {"forward", "loss"}));
        EXPECT_EQ(wire(ledger, kOfTheModel),
                  wire(kept[0], kOfTheModel) +
                      columns * wire_bytes(Collective::AllGather, stream, ranks));
        double volume = tensor_volume(double(layers), kTokens, double(s.config.hidden), true);
        EXPECT_EQ(double(wire(ledger, kOfTheModel)),
                  4 * on_the_wire(volume, ranks) +
                      double(wire_bytes(Collective::AllGather, statistics(ranks), ranks)));
      }
    }
}

// In more and smaller messages; the gather is made of sends and receives.
TEST(TensorParallelVolume, T8_OverlapMovesTheSameBytes) {
  for (int chunks : {1, 3, 5})
    for (int ranks : {2, 4, 8}) {
      SCOPED_TRACE(text("TP", ranks, ", ", chunks, " chunks"));
      std::vector<Ledger> kept = run(ranks, settings(kVariants[1], 2));
      LayoutRig::Settings s =
          settings({"overlap", {.sequence_parallel = true, .overlap = chunks}}, 2);
      const int64_t pieces = std::min<int64_t>(chunks, kTokens / ranks);
      for (const Ledger& ledger : run(ranks, s)) {
        for (const char* phase : {"forward", "loss", "backward"})
          EXPECT_EQ(wire(ledger, {phase}), wire(kept[0], {phase})) << phase;
        EXPECT_EQ(ledger.sum(Collective::Exchange, "tp", "forward").calls, 2 * 2 * (ranks - 1));
        EXPECT_EQ(ledger.sum(Collective::ReduceScatter, "tp", "forward").calls, 2 * 2 * pieces + 1);
      }
    }
}

// --- Time, from formulas -----------------------------------------------------------------------

// A 3B model's layer, 4,096 tokens in bf16, with the curve of two H200 (02's README) in nodes of
// eight, and a network card of 400 Gb/s for each.
const Nodes kNodes{.flops = 400e12,
                   .node = {{1e6, 18e9}, {16e6, 117e9}, {256e6, 236e9}, {1e9, 270e9}},
                   .network = 50e9,
                   .latency = 20e-6};
double speedup(double ranks, const Nodes& nodes) {
  return tensor_layer_time(3072, 4096, 1, 2, nodes) /
         tensor_layer_time(3072, 4096, ranks, 2, nodes);
}

TEST(TensorParallelVolume, T11_EightRanksHelpSixteenAreSlowerAndThirtyTwoMoreSo) {
  EXPECT_DOUBLE_EQ(kNodes.bandwidth(16e6, 8), 117e9);
  EXPECT_DOUBLE_EQ(kNodes.bandwidth(64e6, 2), (117e9 + 236e9) / 2);  // half way in logarithms
  EXPECT_DOUBLE_EQ(kNodes.bandwidth(4e9, 8), 270e9);
  EXPECT_DOUBLE_EQ(kNodes.bandwidth(64e6, 16), 50e9);
  std::map<int, double> gain;
  for (int ranks : {1, 2, 4, 8, 16, 32}) gain[ranks] = speedup(ranks, kNodes);
  EXPECT_NEAR(gain[2], 1.65, 0.01);
  EXPECT_NEAR(gain[4], 2.44, 0.01);
  EXPECT_NEAR(gain[8], 3.21, 0.01);   // 40 % of eight
  EXPECT_NEAR(gain[16], 1.06, 0.01);  // 7 % of sixteen: no faster than one
  EXPECT_NEAR(gain[32], 0.77, 0.01);
  // It is the network: with one like the links inside of a node, more ranks still help.
  Nodes flat = kNodes;
  flat.network = 1e12, flat.latency = 0;
  EXPECT_GT(speedup(16, flat), gain[8]);
  EXPECT_GT(speedup(32, flat), speedup(16, flat));
}

TEST(TensorParallelVolume, T12_OverlapDependsOnWidthAndRanksAlone) {
  const Hardware h100{989e12, 450e9};
  // 2 bytes x (8 - 1) / (2 x 8192) x 989e12 / 450e9
  EXPECT_NEAR(tensor_overlap(8192, 4096, 8, 2, h100), 2.0 * 7 / 16384 * 989e12 / 450e9, 1e-9);
  for (double tokens : {1.0, 512.0, 1e6})  // sequence x micro-batch
    EXPECT_DOUBLE_EQ(tensor_overlap(8192, tokens, 8, 2, h100),
                     tensor_overlap(8192, 4096, 8, 2, h100));
  EXPECT_DOUBLE_EQ(tensor_overlap(16384, 4096, 8, 2, h100),
                   tensor_overlap(8192, 4096, 8, 2, h100) / 2);
  EXPECT_DOUBLE_EQ(tensor_overlap(8192, 4096, 8, 4, h100),
                   tensor_overlap(8192, 4096, 8, 2, h100) * 2);  // fp32
  EXPECT_EQ(tensor_overlap(8192, 4096, 1, 2, h100), 0);
  EXPECT_LT(tensor_overlap(8192, 4096, 4, 2, h100), 1);  // hides in time; at TP8 it does not
  EXPECT_GT(tensor_overlap(8192, 4096, 8, 2, h100), 1);
}

}  // namespace
}  // namespace lockstep
