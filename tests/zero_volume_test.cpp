// What a step moves, from the ledger, against the formulas; and in which order.

#include "common/parallel_formulas.h"
#include "tests/layout_cases.h"

namespace lockstep {
namespace {

// A rank's operations of one step in the data group, without the count of targets.
std::vector<LedgerEntry> of_a_step(const Trained& run, int rank = 0) {
  std::vector<LedgerEntry> found;
  for (const LedgerEntry& e : run.ledgers[size_t(rank)])
    if (e.group == "dp" && (e.phase == "backward" || e.phase == "publish")) found.push_back(e);
  return found;
}
struct Moved {
  int64_t calls = 0, payload = 0, wire = 0;
};
Moved sum(const std::vector<LedgerEntry>& entries, Collective operation) {
  Moved moved;
  for (const LedgerEntry& e : entries)
    if (e.operation == operation) ++moved.calls, moved.payload += e.payload, moved.wire += e.wire;
  return moved;
}

// Elements of the buckets, each with its padding.
struct Sizes {
  int64_t tensors = 0, buckets = 0, padded = 0, head = 0;
};
Sizes sizes_of(const LayoutRig::Settings& s, int ranks) {
  Stage model(s.config, plain_parts(), s.compute, Device::CPU);
  int64_t limit = s.sync == Sync::Zero3
                      ? INT64_MAX
                      : s.parallel.bucket_bytes / int64_t(size_of(s.parallel.gradients));
  Sizes sizes{int64_t(model.parameters().size())};
  std::vector<Bucket> all =
      make_buckets({&model}, limit, s.sync >= Sync::Zero2 ? CutAt::Units : CutAt::Size);
  for (const Bucket& b : all) {
    sizes.padded += Sharding{b.size, ranks}.padded();
    ++sizes.buckets;
  }
  sizes.head = Sharding{all[0].size, ranks}.padded();
  return sizes;
}

void expect_volumes(LayoutRig::Settings s, int ranks, int micro_batches) {
  SCOPED_TRACE(text(name_of(s.sync), " DP", ranks, " m=", micro_batches, " hidden ",
                    s.config.hidden, s.config.tied ? " tied" : ""));
  const int64_t m = micro_batches, w = int64_t(size_of(s.compute));
  const int64_t g = int64_t(size_of(s.parallel.gradients));
  const Sizes sizes = sizes_of(s, ranks);
  Trained run = train(ranks, s, micro_batches, 1);
  EXPECT_EQ(strict_order(run.ledgers), "");
  for (int r = 0; r < ranks; ++r) {
    std::vector<LedgerEntry> step = of_a_step(run, r);
    Moved reduced = sum(step, Collective::AllReduce);
    Moved scattered = sum(step, Collective::ReduceScatter);
    Moved gathered = sum(step, Collective::AllGather);
    EXPECT_EQ(int64_t(step.size()), reduced.calls + scattered.calls + gathered.calls);
    int64_t volume = 0;  // in elements
    if (s.sync <= Sync::Bucketed) {
      EXPECT_EQ(reduced.calls, s.sync == Sync::Bucketed ? sizes.buckets : sizes.tensors);
      EXPECT_EQ(reduced.payload, g * s.config.parameters());
      EXPECT_EQ(scattered.calls + gathered.calls, 0);
      volume = 2 * reduced.payload / g;
      EXPECT_EQ(volume, zero_volume(0, s.config.parameters(), m));
    } else {
      int stage = int(s.sync) - int(Sync::Bucketed);
      // The tied table is the embedding's: the head keeps its gain, and gathers the table once
      // more than an embedding of its own would be.
      int64_t table = s.config.tied ? s.config.vocab * s.config.hidden : 0;
      table = Sharding{table, ranks}.padded();
      int64_t kept = stage == 3 ? sizes.head - table : 0;
      EXPECT_EQ(reduced.calls, 0);
      EXPECT_EQ(scattered.calls, (stage == 1 ? 1 : m) * sizes.buckets);
      EXPECT_EQ(scattered.payload, g * (stage == 1 ? 1 : m) * sizes.padded);
      int64_t units = zero3_units(s.config.layers);
      EXPECT_EQ(gathered.calls,
                stage == 3 ? m * (zero3_gathers(units) + s.config.tied) : sizes.buckets);
      EXPECT_EQ(gathered.payload, w * (stage == 3 ? m * (2 * sizes.padded - kept) : sizes.padded));
      volume = scattered.payload / g + gathered.payload / w;
      EXPECT_EQ(volume, zero_volume(stage, sizes.padded, m, kept));
    }
    bool divides = sizes.padded == s.config.parameters() && g == w;
    if (divides) {  // no rounding anywhere
      int64_t wire = reduced.wire + scattered.wire + gathered.wire;
      EXPECT_EQ(wire * ranks, volume * g * (ranks - 1));
    }
  }
}

TEST(ZeroVolume, Z5_TwoPsiTwoPsiMPlusOneAndThreeM) {
  for (Sync sync : kAllSyncs)
    for (int ranks : {2, 4})
      for (int micro_batches : {1, 3})
        for (bool tied : {false, true}) {
          LayoutRig::Settings s = settings_of({ranks, sync, 1, Recompute::None, tied});
          ASSERT_EQ(sizes_of(s, ranks).padded, s.config.parameters());  // divides
          expect_volumes(s, ranks, micro_batches);
          s.compute = DType::BF16;  // half of it in weights
          expect_volumes(s, ranks, micro_batches);
          s.parallel.gradients = DType::BF16;
          expect_volumes(s, ranks, micro_batches);
        }
}

TEST(ZeroVolume, PaddingTravelsToo) {
  for (Sync sync : kAllSyncs)
    for (int ranks : {3, 8})
      for (bool tied : {false, true}) {
        LayoutRig::Settings s = settings_of({ranks, sync, 1, Recompute::None, tied});
        s.config.hidden = 19;
        s.parallel.bucket_bytes = 1500;
        if (sync >= Sync::Zero1) {
          ASSERT_GT(sizes_of(s, ranks).padded, s.config.parameters());
        }
        expect_volumes(s, ranks, 2);
      }
}

// The source's count is that of L blocks alone: gathered twice, less the one that is kept.
TEST(ZeroVolume, Z5_GathersAreTwiceTheUnitsLessOne) {
  for (int64_t layers : {1, 2, 5}) {
    LayoutRig::Settings s;
    s.config.layers = layers;
    s.sync = Sync::Zero3;
    Moved gathered = sum(of_a_step(train(2, s, 1, 1)), Collective::AllGather);
    EXPECT_EQ(gathered.calls, 2 * (layers + 2) - 1);
    s.sync = Sync::Zero2;
    s.parallel.bucket_bytes = 1 << 30;  // a bucket per unit: the extra gathers are U - 1
    EXPECT_EQ(gathered.calls - sum(of_a_step(train(2, s, 1, 1)), Collective::AllGather).calls,
              layers + 1);
  }
}

// Forward and backward move nothing but the reduce-scatters, which backward starts; then one sum
// for loss and norm, and the local step on an N-th; then bf16 weights are gathered.
TEST(ZeroVolume, Z1_FiveStepsOfAStep) {
  LayoutRig::Settings s = settings_of({4, Sync::Zero1, 1, Recompute::None, false});
  s.compute = DType::BF16;
  Trained run = train(4, s, 2, 1);
  const int64_t n = s.config.parameters(), buckets = sizes_of(s, 4).buckets;
  std::vector<std::string> order;
  Moved gathered;
  for (const LedgerEntry& e : run.ledgers[2]) {
    if (e.phase.empty()) continue;  // before the first step
    std::string call = e.phase + ": " + e.group + " " + name_of(e.operation);
    if (order.empty() || order.back() != call) order.push_back(call);
  }
  EXPECT_EQ(order,
            (std::vector<std::string>{"count: dp all_reduce", "backward: dp reduce_scatter",
                                      "optimizer: world all_reduce", "publish: dp all_gather"}));
  Moved scattered = sum(of_a_step(run), Collective::ReduceScatter);
  gathered = sum(of_a_step(run), Collective::AllGather);
  EXPECT_EQ(scattered.calls, buckets);
  EXPECT_EQ(gathered.calls, buckets);
  EXPECT_EQ(scattered.payload, 4 * n);  // fp32 gradients
  EXPECT_EQ(gathered.payload, 2 * n);   // bf16 weights
  EXPECT_EQ(gathered.wire, 2 * n * 3 / 4);

  run_threads(4, Device::CPU, {}, [&](Communicator& world) {
    ProcessMesh mesh(world, {.dp = 4});
    LayoutRig rig(s, mesh);
    int64_t updated = 0;
    for (const Owned& o : rig.parallel->owned()) updated += o.master.size();
    EXPECT_EQ(updated, n / 4);
  });
}

// Which units have their weights in memory, asked when a unit has computed: in forward it and the
// next one, in backward it and the one before, after the step none.
TEST(ZeroVolume, Z3_WeightsAreGatheredForTheirUnitAndFreed) {
  using Names = std::vector<std::string>;
  run_threads(2, Device::CPU, {}, [&](Communicator& world) {
    ProcessMesh mesh(world, {.dp = 2});
    LayoutRig::Settings s = settings_of({2, Sync::Zero3, 1, Recompute::Full, false});
    Stage* model = nullptr;
    auto present = [&] {
      Names names;
      for (Unit* unit : model->units())
        if (unit->groups[0][0]->value.defined()) names.push_back(unit->name);
      return names;
    };
    std::vector<Names> forward, backward;
    auto recompute = s.more;
    s.more = [&](Parts& parts) {
      recompute(parts);
      parts.around = [&, inner = parts.around](Tape& tape, const Var& x, Unit& unit,
                                               const Body& body) {
        tape.mark("probe", [&] { backward.push_back(present()); });
        Var out = inner(tape, x, unit, body);
        forward.push_back(present());
        return out;
      };
    };
    LayoutRig rig(s, mesh);
    model = rig.model.get();
    for (int step = 0; step < 2; ++step) {
      forward.clear(), backward.clear();
      EXPECT_EQ(present(), Names{});
      rig.step(dealt(s.config, {world.rank(), 2}, 1, step));
      EXPECT_EQ(
          forward,
          (std::vector<Names>{
              {"embedding", "layer 0"}, {"layer 0", "layer 1"}, {"layer 1", "head"}, {"head"}}));
      EXPECT_EQ(backward, (std::vector<Names>{{"layer 1", "head"},
                                              {"layer 0", "layer 1"},
                                              {"embedding", "layer 0"},
                                              {"embedding"}}));
      EXPECT_EQ(present(), Names{});
    }
  });
}

}  // namespace
}  // namespace lockstep
