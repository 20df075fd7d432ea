// What a pipeline holds, by the memory accounts, and what it sends, by the ledger: not what a
// schedule says of itself (pipeline_schedule_test.cpp), but what running it does. And how layers
// are dealt out.

#include "06_pipeline_parallel/closed_forms.h"
#include "06_pipeline_parallel/validate.h"
#include "tests/pipeline_cases.h"

namespace lockstep {
namespace {

// ---- Memory

// The most that each rank has in activations during a step of equal micro-batches.
std::vector<double> peaks(const PipelineCase& c) {
  std::vector<double> bytes(size_t(c.pp));
  run_threads(c.pp, Device::CPU, {.time_limit = 20}, [&](Communicator& world) {
    ProcessMesh mesh(world, {.pp = c.pp});
    PipelineRig rig(pipeline_settings(), c, mesh);
    std::vector<MicroBatch> batches;
    for (int i = 0; i < c.micro_batches; ++i)
      batches.push_back(random_batch(2, 16, deep_config().vocab, uint64_t(i)));
    rig.gradients(batches);  // what is made on first use is there
    int64_t before = memory_account()->now(Category::Activations);
    memory_account()->reset_peaks();
    rig.gradients(batches);
    bytes[size_t(world.rank())] = double(memory_account()->peak(Category::Activations) - before);
    EXPECT_EQ(memory_account()->now(Category::Activations), before);
  });
  return bytes;
}

// Bytes as micro-batches in flight. One in flight takes what AFAB takes more for each of them;
// what a step takes besides (messages, what a backward needs while it runs) is that of one alone.
std::vector<double> held(const PipelineCase& c) {
  std::vector<double> one = peaks({"afab", c.pp, 1}), two = peaks({"afab", c.pp, 2});
  std::vector<double> bytes = peaks(c);
  for (size_t r = 0; r < bytes.size(); ++r) bytes[r] = 1 + (bytes[r] - one[r]) / (two[r] - one[r]);
  return bytes;
}

TEST(PipelineCosts, P3_AllForwardHoldsAllMicroBatches) {
  for (int pp : {2, 4})
    for (int m : {4, 8, 16})
      for (double micro_batches : held({"afab", pp, m})) EXPECT_NEAR(micro_batches, m, 0.05) << pp;
}

TEST(PipelineCosts, P4_OneForwardOneBackwardHoldsAsManyAsRanks) {
  for (int pp : {2, 4, 8})
    for (int m : {1, 2, 4, 8, 16}) {
      std::vector<double> here = held({"1f1b", pp, m});
      for (int rank = 0; rank < pp; ++rank)
        EXPECT_NEAR(here[size_t(rank)], std::min(m, pp - rank), 0.05) << pp << " " << m << rank;
    }
}

// What schedules say of themselves, to a third of a micro-batch: chunks with embedding or head are
// not quite like others.
TEST(PipelineCosts, PeaksOfAllSchedulesAreThoseOfTheirPlanAndFlat) {
  for (const std::string& schedule : schedule_names()) {
    if (schedule == "afab") continue;
    std::vector<double> eight;
    for (int m : {8, 16, 32}) {
      SCOPED_TRACE(text(schedule, ", ", m));
      PipelineCase c{schedule, 4, m};
      PlacedSchedule planned = c.make(m);
      std::vector<double> here = held(c);
      for (size_t r = 0; r < 4; ++r)
        EXPECT_NEAR(here[r], peak_activations(planned.schedule[r], planned.placement.chunks), 0.34)
            << "rank " << r;
      if (m == 8) eight = here;
      EXPECT_EQ(here, eight);
    }
  }
}

// Half of the layers, twice the micro-batches in flight.
TEST(PipelineCosts, P5_ActivationsDoNotShrinkWithMoreStages) {
  double whole = peaks({"1f1b", 1, 8})[0];
  for (int pp : {2, 4, 8}) EXPECT_NEAR(peaks({"1f1b", pp, 8})[0] / whole, 1, 0.015) << pp;
}

// ---- Messages

TEST(PipelineCosts, P6_MessagesAtEachBoundary) {
  const LayoutRig::Settings s = pipeline_settings();
  const int64_t tokens = 64 * 3;
  for (const std::string& schedule : schedule_names())
    for (int pp : {2, 4}) {
      PipelineCase c{schedule, pp, 8};
      SCOPED_TRACE(c.name());
      Placement placement = c.make(8).placement;
      std::map<std::pair<int, int>, int64_t> bytes, messages, boundaries;  // by ranks
      auto pair = [](int a, int b) { return std::pair{std::min(a, b), std::max(a, b)}; };
      for (int stage = 0; stage + 1 < placement.stages(); ++stage)
        if (placement.rank_of(stage) != placement.rank_of(stage + 1))
          ++boundaries[pair(placement.rank_of(stage), placement.rank_of(stage + 1))];
      Trained run = train_pipeline(c, s);
      for (int rank = 0; rank < pp; ++rank)
        for (const LedgerEntry& e : run.ledgers[size_t(rank)]) {
          if (e.phase != "pipeline" || e.operation != Collective::Exchange) continue;
          EXPECT_EQ(e.sends.size() + e.receives.size(), 1u);  // each message travels alone
          if (e.sends.empty()) continue;
          bytes[pair(rank, e.sends[0])] += e.payload;
          ++messages[pair(rank, e.sends[0])];
        }
      int64_t all = 0;
      EXPECT_EQ(bytes.size(), boundaries.size());
      for (const auto& [ranks, count] : boundaries) {
        EXPECT_EQ(bytes[ranks], count * 4 * message_volume(8, tokens / 8, s.config.hidden));
        EXPECT_EQ(messages[ranks], count * 2 * 8);
        all += count;
      }
      // Interleaved: p v - 1 in a loop. A V turns round without a message.
      EXPECT_EQ(all, placement.shape == Placement::V ? 2 * pp - 2 : pp * placement.chunks - 1);
    }
}

// Nothing but messages moves between stages, and only the table's gradient between the ends.
TEST(PipelineCosts, OnlyATiedTableIsSummedOverStages) {
  for (bool tied : {false, true})
    for (const char* schedule : {"1f1b", "zb-v"}) {
      Trained run = train_pipeline({schedule, 4, 4}, pipeline_settings(tied));
      for (size_t rank = 0; rank < 4; ++rank) {
        int64_t sums = 0;
        for (const LedgerEntry& e : run.ledgers[rank])
          if (e.phase == "sum" && e.members.size() > 1 && e.operation == Collective::AllReduce)
            sums += e.payload;
        ModelConfig c = deep_config();
        bool apart = tied && std::string(schedule) == "1f1b" && (rank == 0 || rank == 3);
        // (Everybody also sums loss and norm, in the optimizer's step.)
        int64_t loss_and_norm = 2 * 8;
        EXPECT_EQ(sums - loss_and_norm, apart ? 4 * c.vocab * c.hidden : 0) << schedule << rank;
      }
    }
}

// ---- Layers over stages

std::vector<int64_t> counts(int64_t layers, const Placement& placement, EndCosts ends = {}) {
  std::vector<int64_t> out;
  int64_t next = 0;
  for (const StageSpan& span : split_layers(layers, placement, ends)) {
    EXPECT_EQ(span.first_layer, next);
    EXPECT_EQ(span.embedding, out.empty());
    EXPECT_EQ(span.head, int(out.size()) == placement.stages() - 1);
    EXPECT_EQ(span.ends_apart, !placement.ends_share_a_rank());
    EXPECT_GE(span.layers, 1);
    out.push_back(span.layers);
    next += span.layers;
  }
  EXPECT_EQ(next, layers);
  return out;
}
double dearest(const std::vector<int64_t>& split, EndCosts ends) {
  double most = 0;
  for (size_t s = 0; s < split.size(); ++s)
    most = std::max(most, double(split[s]) + (s == 0 ? ends.embedding : 0) +
                              (s + 1 == split.size() ? ends.head : 0));
  return most;
}
// Of all ways to deal out so many layers.
double least_possible(std::vector<int64_t> begun, int64_t left, size_t stages, EndCosts ends) {
  if (begun.size() + 1 == stages) {
    begun.push_back(left);
    return dearest(begun, ends);
  }
  double least = INFINITY;
  for (int64_t n = 1; n <= left - int64_t(stages - begun.size() - 1); ++n) {
    begun.push_back(n);
    least = std::min(least, least_possible(begun, left - n, stages, ends));
    begun.pop_back();
  }
  return least;
}

TEST(PipelineCosts, P2_LayersOverStages) {
  using Counts = std::vector<int64_t>;
  EXPECT_EQ(counts(8, {Placement::Loop, 2, 1}), (Counts{4, 4}));  // 1-4 and 5-8
  EXPECT_EQ(counts(30, {Placement::Loop, 4, 1}, {.head = 4}), (Counts{9, 9, 8, 4}));
  EXPECT_EQ(counts(16, {Placement::Loop, 4, 1}, {.embedding = 1, .head = 1}), (Counts{4, 5, 4, 3}));
  EXPECT_EQ(counts(8, {Placement::Loop, 4, 1}, {.head = 50}), (Counts{3, 2, 2, 1}));
  EXPECT_EQ(counts(16, {Placement::V, 2, 2}, {.head = 1.5}), (Counts{5, 4, 4, 3}));
  // The head of a model with a large vocabulary, by its operations.
  ModelConfig c;
  c.hidden = 2048, c.heads = 32, c.kv_heads = 8, c.head_dim = 64, c.ffn = 8192, c.vocab = 128256;
  EXPECT_NEAR(end_costs(c, 2048).head, 4, 0.4);
  EXPECT_EQ(end_costs(c, 2048).embedding, 0);
}

TEST(PipelineCosts, P2_NoStageCostsMoreThanItMust) {
  for (int stages = 1; stages <= 4; ++stages)
    for (int64_t layers = stages; layers <= 10; ++layers)
      for (EndCosts ends : {EndCosts{}, {0, 0.3}, {0, 2.6}, {1.2, 3.1}, {0.5, 20}}) {
        std::vector<int64_t> split = counts(layers, {Placement::Loop, stages, 1}, ends);
        EXPECT_DOUBLE_EQ(dearest(split, ends), least_possible({}, layers, size_t(stages), ends))
            << layers << " layers, " << stages << " stages, head " << ends.head;
      }
}

// However layers are placed.
TEST(PipelineCosts, P2_UnevenStagesAreTheSameBits) {
  Trained plain = train_plain(1, 4, pipeline_settings());
  for (const char* schedule : {"1f1b", "interleaved", "zb-v"})
    for (EndCosts ends : {EndCosts{0, 3}, {2, 20}}) {
      PipelineCase c{schedule, 2, 4};
      c.ends = ends;
      expect_bitwise(train_pipeline(c, pipeline_settings()).gradients, plain.gradients);
    }
}

}  // namespace
}  // namespace lockstep
