// Mistakes of data-parallel trainers, in their smallest scenarios: gradients that a test hands out,
// and layers that are left out.

#include <algorithm>

#include "tests/layout_cases.h"

namespace lockstep {
namespace {

constexpr int64_t kOneBucket = 1 << 30;

// A backward pass without a model: each parameter gets its gradient, in this order, between the
// hooks that the tape would call. value(p, i): what is added to element i of p.
template <class Value>
void hand_out(const Weights& order, const Value& value) {
  for (Parameter* p : order) {
    if (p->need_grad) p->need_grad(*p);
    float* grad = p->grad.data<float>();
    for (int64_t i = 0; i < p->size(); ++i) grad[i] += value(*p, i);
    if (p->on_grad_ready) p->on_grad_ready(*p);
  }
}
Weights backwards(const LayoutRig& rig) {
  Weights all = rig.model->parameters();
  std::reverse(all.begin(), all.end());
  return all;
}
// As if one target counted.
void begin_step(LayoutRig& rig, int64_t micro_batches) {
  rig.parallel->begin_step(micro_batches);
  rig.optimizer->begin_step(Tensor::from<int64_t>({1}, {1}));
}
int64_t reductions(Communicator& world) {
  const Ledger& ledger = world.ledger();
  return ledger.sum(Collective::AllReduce, "dp").calls +
         ledger.sum(Collective::ReduceScatter, "dp").calls;
}

// The row's 4.0 and 7.0, summed over two micro-batches, belong to losses of each rank's own tokens.
// Here a loss is divided by the tokens of both, so that ranks add 2.0 and 3.5.
TEST(DataParallel, Pitfall16_AccumulationSumsOnceAndAfterTheLastMicroBatch) {
  constexpr float kLocal[2][2] = {{0.5f, 1.5f}, {1.25f, 2.25f}};  // [rank][micro-batch]
  for (Sync sync : kAllSyncs)
    run_threads(2, Device::CPU, {.time_limit = 10}, [&](Communicator& world) {
      ProcessMesh mesh(world, {.dp = 2});
      LayoutRig::Settings s;
      s.sync = sync;
      s.parallel.bucket_bytes = kOneBucket;
      LayoutRig rig(s, mesh);
      int64_t tensors = int64_t(rig.model->parameters().size());
      int64_t units = int64_t(rig.model->units().size());
      bool each_time = sync >= Sync::Zero2;
      for (int step = 0; step < 2; ++step) {
        int64_t before = reductions(world);
        begin_step(rig, 2);
        for (float local : kLocal[world.rank()]) {
          EXPECT_EQ(reductions(world) - before, local == kLocal[world.rank()][0] ? 0
                                                : each_time                      ? units
                                                                                 : 0)
              << name_of(sync);
          hand_out(backwards(rig), [&](const Parameter&, int64_t) { return local; });
        }
        rig.parallel->finish();
        int64_t per_step = sync < Sync::Bucketed ? tensors : each_time ? 2 * units : 1;
        EXPECT_EQ(reductions(world) - before, per_step) << name_of(sync);
        for (const Owned& o : rig.parallel->owned())
          for (double g : doubles(o.grad)) ASSERT_EQ(g, 5.5) << name_of(sync);
      }
    });
}

TEST(DataParallel, Pitfall18_OrderOfReadyGradientsMayDifferBetweenRanks) {
  auto run = [](Sync sync, bool shuffled) {
    Whole gradients;
    Communicator::Options strict = {.time_limit = 10, .check_calls = true, .check_buffers = true};
    run_threads(2, Device::CPU, strict, [&](Communicator& world) {
      ProcessMesh mesh(world, {.dp = 2});
      LayoutRig::Settings s;
      s.sync = sync;
      s.parallel.bucket_bytes = 2000;
      LayoutRig rig(s, mesh);
      begin_step(rig, 2);
      for (int micro_batch = 0; micro_batch < 2; ++micro_batch) {
        Weights order = backwards(rig);
        RandomStream draw(uint64_t(micro_batch), "order");
        if (shuffled && world.rank() == 1)
          for (size_t i = order.size(); i-- > 1;)
            std::swap(order[i], order[draw.at(i).x[0] % (i + 1)]);
        hand_out(order, [&](const Parameter& p, int64_t i) {
          return RandomStream(uint64_t(world.rank() + 2 * micro_batch), p.name).normal(uint64_t(i));
        });
      }
      rig.parallel->finish();
      gradients.add(rig.parallel->owned(), &Owned::grad);
    });
    return gradients.get();
  };
  for (Sync sync : kAllSyncs) {
    SCOPED_TRACE(name_of(sync));
    expect_bitwise(run(sync, true), run(sync, false));
  }
}

TEST(DataParallel, Pitfall20_BucketSizeDoesNotChangeGradients) {
  LayoutRig::Settings s;
  const int64_t one_tensor = s.config.vocab * s.config.hidden * 4;
  for (int ranks : {2, 4}) {
    s.sync = Sync::Naive;
    Tensors naive = train(ranks, s, 1, 1).gradients;
    for (Sync sync : {Sync::Overlapped, Sync::Bucketed, Sync::Zero1, Sync::Zero2, Sync::Zero3})
      for (int64_t bytes : {int64_t(1), int64_t(1024), one_tensor, kOneBucket}) {
        SCOPED_TRACE(text("DP", ranks, " ", name_of(sync), ", ", bytes, " bytes"));
        s.sync = sync;
        s.parallel.bucket_bytes = bytes;
        expect_bitwise(train(ranks, s, 1, 1).gradients, naive);
      }
  }
}

TEST(DataParallel, Pitfall32_StagesAgreeUnderAccumulation) {
  LayoutRig::Settings s;
  Trained plain = train(2, s, 4, 5);
  for (Sync sync : {Sync::Zero1, Sync::Zero2, Sync::Zero3}) {
    SCOPED_TRACE(name_of(sync));
    s.sync = sync;
    expect_same(train(2, s, 4, 5), plain);
  }
}

// Averages of 10 and 0 are 5, clipped to 1; who clips first and averages then gets 0.5. The loss is
// divided by the tokens of both ranks: they add 5 and 0.
TEST(DataParallel, Pitfall38_ClippingComesAfterTheSum) {
  for (Sync sync : kAllSyncs)
    run_threads(2, Device::CPU, {.time_limit = 10}, [&](Communicator& world) {
      ProcessMesh mesh(world, {.dp = 2});
      LayoutRig::Settings s;
      s.sync = sync;
      s.rule.max_norm = 1;
      LayoutRig rig(s, mesh);
      begin_step(rig, 1);
      hand_out(backwards(rig), [&](const Parameter& p, int64_t i) {
        return p.name == "model.norm.weight" && i == 0 && world.rank() == 0 ? 10.0f / 2 : 0.0f;
      });
      rig.parallel->finish();
      rig.update();
      EXPECT_EQ(rig.state().gradient_norm, 5.0);
      const auto& owned = rig.optimizer->owned();
      for (size_t i = 0; i < owned.size(); ++i)
        if (owned[i].parameter->name == "model.norm.weight" && owned[i].first == 0) {
          // After one step m is (1 - beta1) times the clipped gradient.
          double m = doubles(rig.optimizer->moments()[i].m)[0];
          EXPECT_NEAR(m / (1 - double(s.rule.beta1)), 1.0, 1e-6) << name_of(sync);
        }
    });
}

// Norm gains whose rows are spread over TP ranks, too: their gradients are parts of a sum over both
// axes, those of matrices over the data alone. Buckets keep them apart, and every neighbour in one.
Parts spread_rows() {
  Parts parts = plain_parts();
  parts.stream = {Axis::Data, Axis::TP};
  return parts;
}
TEST(DataParallel, BucketsHoldEveryParameterOnceAndOneSumEach) {
  ModelConfig config = small_config();
  config.attention_bias = config.mlp_bias = true;
  Stage model(config, spread_rows(), DType::F32, Device::CPU);
  for (CutAt cut : {CutAt::Size, CutAt::Units})
    for (int64_t limit : {int64_t(1), int64_t(300), int64_t(1000), INT64_MAX}) {
      std::map<Parameter*, size_t> bucket_of;
      std::vector<Bucket> buckets = make_buckets({&model}, limit, cut);
      for (size_t b = 0; b < buckets.size(); ++b) {
        int64_t size = 0;
        for (Parameter* p : buckets[b].parameters) {
          EXPECT_TRUE(bucket_of.emplace(p, b).second) << p->name << " is in two buckets";
          EXPECT_EQ(p->sum_over, buckets[b].parameters[0]->sum_over);
          size += p->size();
        }
        EXPECT_EQ(buckets[b].size, size);
      }
      EXPECT_EQ(bucket_of.size(), model.parameters().size());
      for (Unit* unit : model.units())
        for (const Weights& group : unit->groups)
          for (Parameter* p : group) EXPECT_EQ(bucket_of[p], bucket_of[group[0]]) << p->name;
      if (limit == INT64_MAX) {
        EXPECT_EQ(buckets.size(), cut == CutAt::Size ? 2u : 2 * model.units().size() - 1);
      }
    }
}
TEST(DataParallel, GradientsInPartsAreSummedOverAllTheirAxesAndCountedOnce) {
  for (Sync sync : kAllSyncs)
    run_threads(4, Device::CPU, {.time_limit = 10, .check_calls = true}, [&](Communicator& world) {
      ProcessMesh mesh(world, {.dp = 2, .tp = 2});
      LayoutRig::Settings s;
      s.sync = sync;
      s.parallel.bucket_bytes = 2000;
      s.more = [](Parts& parts) { parts = spread_rows(); };
      LayoutRig rig(s, mesh);
      begin_step(rig, 1);
      hand_out(backwards(rig), [](const Parameter&, int64_t) { return 1.0f; });
      rig.parallel->finish();
      for (const Owned& o : rig.parallel->owned()) {
        bool gain = o.parameter->shard.whole.size() == 1;
        for (double g : doubles(o.grad)) ASSERT_EQ(g, gain ? 4 : 2) << o.parameter->name;
      }
      rig.update();
      // TP ranks hold different matrices (here: as many as the whole), and the same gains.
      int64_t gains = (2 * s.config.layers + 1) * s.config.hidden;
      int64_t matrices = s.config.parameters() - gains;
      EXPECT_NEAR(rig.state().gradient_norm, std::sqrt(16.0 * gains + 2 * 4.0 * matrices), 1e-9)
          << name_of(sync);
    });
}

// --- Layers that are left out ------------------------------------------------------------------

// Layer 1 passes its input on wherever skips() says so. Inside of what gathers weights, as a
// model that drops layers would do it.
void skip_layer_1(Parts& parts, std::function<bool()> skips) {
  parts.around = [inner = parts.around, skips](Tape& tape, const Var& x, Unit& unit,
                                               const Body& body) {
    if (unit.name == "layer 1" && skips()) return x;
    return inner(tape, x, unit, body);
  };
}

using Skips = std::function<bool(int rank, int micro_batch)>;
struct Skipped {
  Tensors gradients;
  std::string said;  // on stderr
};
// Three steps, the gradients of the last. Forward of a micro-batch asks once.
Skipped run_with(Sync sync, int ranks, int accumulation, bool tied, const Skips& skips) {
  Whole gradients;
  testing::internal::CaptureStderr();
  run_threads(ranks, Device::CPU, {.time_limit = 10}, [&](Communicator& world) {
    ProcessMesh mesh(world, {.dp = ranks});
    LayoutRig::Settings s = settings_of({ranks, sync, accumulation, Recompute::None, tied});
    int asked = 0;
    s.more = [&](Parts& parts) {
      skip_layer_1(parts, [&] { return skips(world.rank(), asked++ % accumulation); });
    };
    LayoutRig rig(s, mesh);
    for (int step = 0; step < 3; ++step)
      rig.gradients(dealt(s.config, {world.rank(), ranks}, accumulation, step));
    gradients.add(rig.parallel->owned(), &Owned::grad);
  });
  return {gradients.get(), testing::internal::GetCapturedStderr()};
}
size_t times(const std::string& in, const std::string& what) {
  size_t n = 0;
  for (size_t at = in.find(what); at != std::string::npos; at = in.find(what, at + 1)) ++n;
  return n;
}
// One rank reads the micro-batches of all, in the order of the global batch: rank r's k-th is
// number k * ranks + r.
Tensors on_one_rank(int ranks, int accumulation, bool tied, const Skips& skips) {
  auto here = [&](int, int n) { return skips(n % ranks, n / ranks); };
  return run_with(Sync::Naive, 1, ranks * accumulation, tied, here).gradients;
}
void expect_gradients(const Tensors& run, const Tensors& want) {
  for (const auto& [name, g] : want) EXPECT_LE(relative_error(run.at(name), g), 1e-5) << name;
}

// All ranks hold all parameters; the norm and the checkpoint are work for all of them.
TEST(DataParallel, RanksTakeTurnsInCounting) {
  for (Sync sync : {Sync::Naive, Sync::Overlapped, Sync::Bucketed})
    run_threads(3, Device::CPU, {.time_limit = 10}, [&](Communicator& world) {
      ProcessMesh mesh(world, {.dp = 3});
      LayoutRig::Settings s;
      s.sync = sync;
      LayoutRig rig(s, mesh);
      for (size_t i = 0; i < rig.parallel->owned().size(); ++i)
        EXPECT_EQ(rig.parallel->owned()[i].counted, int(i % 3) == world.rank()) << name_of(sync);
    });
}

TEST(DataParallel, Pitfall19_LayerSkippedOnAllRanksHasNoGradient) {
  Skips all = [](int, int) { return true; };
  Tensors want = on_one_rank(2, 1, false, all);
  for (Sync sync : kAllSyncs) {
    SCOPED_TRACE(name_of(sync));
    Skipped run = run_with(sync, 2, 1, false, all);
    expect_gradients(run.gradients, want);
    for (const auto& [name, g] : run.gradients) {
      bool in_layer_1 = name.find("layers.1.") != std::string::npos;
      EXPECT_EQ(std::count(g.begin(), g.end(), 0.0) == int64_t(g.size()), in_layer_1) << name;
      if (sync == Sync::Naive) continue;                                         // asks nobody
      EXPECT_EQ(times(run.said, name + " took no part"), in_layer_1 ? 2u : 0u);  // once a rank
    }
  }
}

TEST(DataParallel, Pitfall19_LayerSkippedOnOneRankContributesZero) {
  Skips rank_1 = [](int rank, int) { return rank == 1; };
  Tensors want = on_one_rank(2, 1, false, rank_1);
  for (Sync sync : kAllSyncs) {
    SCOPED_TRACE(name_of(sync));
    Skipped run = run_with(sync, 2, 1, false, rank_1);
    expect_gradients(run.gradients, want);
    if (sync == Sync::Naive) continue;
    for (const auto& [name, g] : run.gradients)
      EXPECT_EQ(times(run.said, name + " took no part"),
                name.find("layers.1.") != std::string::npos ? 1u : 0u);
  }
}

// A layer that is left out of the first micro-batch alone. Were its sums to catch up in the second,
// they would start in the middle of a backward, when the tied table has half of its gradient.
TEST(DataParallel, Pitfall19_LayerSkippedInOneMicroBatch) {
  for (Skips skips : {Skips([](int, int k) { return k == 0; }),
                      Skips([](int rank, int k) { return rank == 1 && k == 0; })})
    for (bool tied : {false, true}) {
      Tensors want = on_one_rank(2, 3, tied, skips);
      for (Sync sync : kAllSyncs) {
        SCOPED_TRACE(text(name_of(sync), tied ? ", tied" : ""));
        expect_gradients(run_with(sync, 2, 3, tied, skips).gradients, want);
      }
    }
}

}  // namespace
}  // namespace lockstep
