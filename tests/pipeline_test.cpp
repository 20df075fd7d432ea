// Pipelines that run: every schedule computes what one rank computes, whoever is late.

#include <set>
#include <thread>

#include "06_pipeline_parallel/stopwatch.h"
#include "tests/pipeline_cases.h"

namespace lockstep {
namespace {

struct Selected {
  PipelineCase layout;
  bool tied;
};
// Of all combinations (pipeline_matrix_test.cpp), so many that any two choices meet: every
// schedule, number of ranks and of micro-batches, and the rest by lot.
std::vector<Selected> selection() {
  std::vector<Selected> out;
  RandomStream draw(1, "layouts");
  for (const std::string& schedule : schedule_names())
    for (int pp : kPipelines)
      for (int m : kMicroBatches) {
        uint32_t lot = draw.at(out.size()).x[0];
        PipelineCase c{schedule, pp, m, int(lot % 2) + 1};
        if (pp == 8 && m < 16) c.dp = 1;  // sixteen threads: not every time
        c.sync = lot / 2 % 2 ? Sync::Zero1 : Sync::Bucketed;
        out.push_back({c, lot / 4 % 2 == 1});
      }
  return out;
}

// Which two choices meet in layouts that are allowed.
using Meetings = std::set<std::array<std::string, 2>>;
void meet(const PipelineCase& c, bool tied, Meetings& met) {
  if (!c.allowed()) return;
  std::vector<std::string> choices{c.schedule,       text("PP", c.pp), text(c.micro_batches),
                                   text("DP", c.dp), name_of(c.sync),  tied ? "tied" : "untied"};
  for (const std::string& a : choices)
    for (const std::string& b : choices) met.insert({a, b});
}

TEST(Pipeline, AnyTwoChoicesMeetInTheSelection) {
  Meetings all, met;
  for (const Selected& s : selection()) {
    meet(s.layout, s.tied, met);
    for (int dp : {1, 2})
      for (Sync sync : {Sync::Bucketed, Sync::Zero1})
        for (bool tied : {false, true}) {
          PipelineCase c = s.layout;
          c.dp = dp, c.sync = sync;
          meet(c, tied, all);
        }
  }
  for (const auto& pair : all) EXPECT_TRUE(met.contains(pair)) << pair[0] << " and " << pair[1];
}

TEST(Pipeline, GradientsAreThoseWithoutAPipelineBitByBit) {
  PipelineReferences references;
  int ran = 0;
  for (const Selected& s : selection()) ran += references.expect_same(s.layout, s.tied);
  EXPECT_GT(ran, 80);
}

TEST(Pipeline, TenStepsAreThoseOfOneRank) {
  for (bool tied : {false, true}) {
    Trained one = train_plain(1, 1, pipeline_settings(tied), 10);
    for (const std::string& schedule : schedule_names()) {
      SCOPED_TRACE(schedule);
      expect_same(train_pipeline({schedule, 2, 4, 2, Sync::Zero1}, pipeline_settings(tied), 10),
                  one);
    }
  }
}

// Sixteen bits: stages pass on and return what they would have computed with.
TEST(Pipeline, SixteenBitsAreTheSameBitsToo) {
  LayoutRig::Settings s = pipeline_settings();
  s.compute = DType::BF16;
  Trained plain = train_plain(2, 4, s);
  for (const char* schedule : {"1f1b", "zb-h1", "interleaved", "zb-v"}) {
    SCOPED_TRACE(schedule);
    Trained run = train_pipeline({schedule, 2, 4, 2}, s);
    expect_bitwise(run.gradients, plain.gradients);
    expect_bitwise(run.weights, plain.weights);
  }
}

TEST(Pipeline, ChunksAndGroupsOfInterleavedAreTheSameBits) {
  Trained plain = train_plain(1, 8, pipeline_settings());
  for (auto [chunks, group] : {std::pair{1, 0}, {3, 2}, {4, 4}, {8, 8}}) {
    SCOPED_TRACE(text(chunks, " chunks, groups of ", group));
    PipelineCase c{"interleaved", 2, 8};
    c.chunks = chunks, c.group = group;
    expect_bitwise(train_pipeline(c, pipeline_settings()).gradients, plain.gradients);
  }
}

// A run's last step may have fewer micro-batches: the same executor, another plan.
TEST(Pipeline, StepsMayDifferInTheirMicroBatches) {
  Trained plain = train_plain(1, 2, pipeline_settings());
  for (const char* schedule : {"1f1b", "interleaved", "zb-h1", "zb-v"}) {
    SCOPED_TRACE(schedule);
    Whole gradients;
    run_threads(2, Device::CPU, {.time_limit = 20}, [&](Communicator& world) {
      ProcessMesh mesh(world, {.pp = 2});
      PipelineRig rig(pipeline_settings(), {schedule, 2, 4}, mesh);
      for (int m : {4, 2, 8, 2}) rig.gradients(flowing(deep_config(), {}, m));
      gradients.add(rig.parallel->owned(), &Owned::grad);
    });
    expect_bitwise(gradients.get(), plain.gradients);
  }
}

// A lone rank is a pipeline too, where embedding and head share a stage, or a V is folded.
TEST(Pipeline, OneRankRunsEverySchedule) {
  Trained plain = train_plain(1, 4, pipeline_settings(true));
  for (const std::string& schedule : schedule_names()) {
    SCOPED_TRACE(schedule);
    Trained run = train_pipeline({schedule, 1, 4}, pipeline_settings(true));
    expect_same(run, plain);
  }
}

// Recomputation replays a stage in backward; with I and W apart too.
TEST(Pipeline, RecomputedActivationsAreTheSameBits) {
  LayoutRig::Settings s = pipeline_settings();
  Trained plain = train_plain(1, 4, s);
  s.more = [](Parts& parts) { use_recomputation(parts, Recompute::Full); };
  for (const char* schedule : {"afab", "1f1b", "zb-h1", "zb-v"}) {
    SCOPED_TRACE(schedule);
    expect_bitwise(train_pipeline({schedule, 2, 4}, s).gradients, plain.gradients);
  }
}

// Fresh memory is NaN: nobody reads what has not arrived.
TEST(Pipeline, PoisonedMemoryChangesNothing) {
  for (const std::string& schedule : schedule_names()) {
    PipelineCase c{schedule, 2, 4, 2, Sync::Zero1};
    Trained clean = train_pipeline(c, pipeline_settings(true), 2);
    memory_account()->poison = true;
    Trained poisoned = train_pipeline(c, pipeline_settings(true), 2, {.check_buffers = true});
    memory_account()->poison = false;
    EXPECT_EQ(poisoned.losses, clean.losses) << schedule;
    expect_bitwise(poisoned.weights, clean.weights);
  }
}

// I leaves gradients of weights alone, W makes them; B does both.
TEST(Pipeline, P8_WeightsHaveAnActionOfTheirOwn) {
  for (const char* schedule : {"zb-h1", "zb-h2", "zb-v", "1f1b"})
    run_threads(2, Device::CPU, {.time_limit = 20}, [&](Communicator& world) {
      ProcessMesh mesh(world, {.pp = 2});
      PipelineRig rig(pipeline_settings(), {schedule, 2, 4}, mesh);
      auto gradients = [&] {
        std::vector<std::vector<double>> all;
        for (Stage* stage : rig.chunks)
          for (Parameter* p : stage->parameters()) all.push_back(doubles(p->grad));
        return all;
      };
      std::vector<std::vector<double>> before;
      rig.gradients(flowing(deep_config(), {}, 4), [&](const Action& a, bool begins) {
        std::vector<std::vector<double>> now = gradients();
        bool adds = !begins && (a.kind == Action::B || a.kind == Action::W);
        EXPECT_EQ(now != before, adds || before.empty()) << schedule << ": " << describe(a);
        before = now;
      });
    });
}

// What a stopwatch sees of a step, and what a simulation makes of it.
TEST(Pipeline, MeasuredTimelineHasTheScheduleAndItsTimes) {
  for (const std::string& name : schedule_names()) {
    PlacedSchedule pipeline = PipelineCase{name, 2, 4}.make(4);
    run_threads(2, Device::CPU, {.time_limit = 20}, [&](Communicator& world) {
      ProcessMesh mesh(world, {.pp = 2});
      PipelineRig rig(pipeline_settings(), {name, 2, 4}, mesh);
      Stopwatch watch;
      EXPECT_FALSE(watch.any());
      watch.start(mesh.pp(), Device::CPU);
      rig.gradients(flowing(deep_config(), {}, 4), watch.observer());
      Timeline timeline = gather_timeline(mesh, watch.spans());
      ASSERT_EQ(timeline.size(), 2u);
      for (size_t rank = 0; rank < 2; ++rank) {
        std::vector<Action> actions;
        double end = 0;
        for (const ActionSpan& s : timeline[rank]) {
          actions.push_back(s.action);
          EXPECT_LE(end, s.begin);
          EXPECT_LT(s.begin, s.end);
          end = s.end;
        }
        EXPECT_EQ(actions, pipeline.schedule[rank]) << name;
      }
    });
    Times times = equal_times(pipeline.placement.stages(), 1, 2, 4);
    times.forward[1] = 3, times.weight[1] = 8;
    Timeline planned = simulate(pipeline.schedule, pipeline.placement, times);
    Times mean = mean_times(planned, pipeline.placement);
    EXPECT_EQ(mean.forward, times.forward) << name;
    EXPECT_DOUBLE_EQ(idle(simulate(pipeline.schedule, pipeline.placement, mean)).step,
                     idle(planned).step)
        << name;
  }
}

// One rank is late at one action, and then at the next one, and so on. Nobody hangs, and nothing
// arrives in another order.
TEST(Pipeline, NoRankHangsWhoeverIsLateAtWhateverAction) {
  for (const std::string& schedule : schedule_names()) {
    SCOPED_TRACE(schedule);
    expect_patience({schedule, 2, 4}, 2e-3);
  }
}

TEST(Pipeline, NoRankHangsWhenAllAreLate) {
  for (const std::string& schedule : schedule_names()) {
    PipelineCase c{schedule, 4, 8};
    Tensors first;
    for (uint64_t seed : {1, 2, 3}) {
      Whole gradients;
      run_threads(4, Device::CPU, {.time_limit = 20}, [&](Communicator& world) {
        ProcessMesh mesh(world, {.pp = 4});
        PipelineRig rig(pipeline_settings(), c, mesh);
        RandomStream draw(seed, text("rank ", world.rank()));
        uint64_t at = 0;
        auto late = [&](const Action&, bool) {
          std::this_thread::sleep_for(std::chrono::microseconds(draw.at(at++).x[0] % 1500));
        };
        rig.gradients(flowing(deep_config(), {}, 8), late);
        gradients.add(rig.parallel->owned(), &Owned::grad);
      });
      if (seed == 1) first = gradients.get();
      expect_bitwise(gradients.get(), first);
    }
  }
}

TEST(Pipeline, Pitfall15_SumsOverDataHappenOnEveryStage) {
  for (const char* schedule : {"1f1b", "afab"})
    for (Sync sync : {Sync::Naive, Sync::Overlapped, Sync::Bucketed}) {
      SCOPED_TRACE(text(schedule, " ", name_of(sync)));
      Trained one = train_plain(1, 1, pipeline_settings());
      std::array<Tensors, 2> copies;  // of each DP rank, from all stages
      std::mutex mutex;
      run_threads(4, Device::CPU, {.time_limit = 20}, [&](Communicator& world) {
        ProcessMesh mesh(world, {.dp = 2, .pp = 2});
        PipelineRig rig(pipeline_settings(), {schedule, 2, 2, 2, sync}, mesh);
        rig.gradients(flowing(deep_config(), {mesh.here().dp, 2}, 2));
        EXPECT_GT(world.ledger().sum(Collective::AllReduce, mesh.data().name(), "pipeline").calls +
                      world.ledger().sum(Collective::AllReduce, mesh.data().name(), "sum").calls,
                  0);
        std::lock_guard lock(mutex);
        for (const Owned& o : rig.parallel->owned())
          copies[size_t(mesh.here().dp)][o.parameter->name] = doubles(o.grad);
      });
      expect_bitwise(copies[1], copies[0]);
      ASSERT_EQ(copies[0].size(), one.gradients.size());
      for (const auto& [name, g] : one.gradients)
        EXPECT_LE(relative_error(copies[0].at(name), g), 1e-5) << name;
    }
}

// Stages whose gradients have norms 3 and 4.
TEST(Pipeline, Pitfall36_NormIsThatOfAllStages) {
  for (Sync sync : {Sync::Bucketed, Sync::Zero1})
    run_threads(4, Device::CPU, {}, [&](Communicator& world) {
      ProcessMesh mesh(world, {.dp = 2, .pp = 2});
      LayoutRig::Settings s = pipeline_settings();
      s.rule.max_norm = 1;
      PipelineRig rig(s, {"1f1b", 2, 4, 2, sync}, mesh);
      rig.gradients(flowing(s.config, {mesh.here().dp, 2}, 4));
      for (const Owned& o : rig.parallel->owned()) zero(o.grad);
      double stage_norm = mesh.here().pp == 0 ? 3 : 4;
      for (const Owned& o : rig.parallel->owned())  // of one element, wherever its owner is
        if (o.parameter == rig.chunks[0]->parameters()[0] && o.first == 0 && o.grad.size() > 0)
          o.grad.data<float>()[0] = float(stage_norm);
      rig.update();
      EXPECT_FLOAT_EQ(float(rig.state().gradient_norm), 5.0f);
      EXPECT_NEAR(rig.state().clip, 0.2, 1e-5);
    });
}

TEST(Pipeline, Pitfall48_FirstWeightsAreTheSameBitsInAnyPipeline) {
  for (bool tied : {false, true}) {
    auto first_weights = [&](const PipelineCase& c) {
      Whole weights;
      run_threads(c.ranks(), Device::CPU, {}, [&](Communicator& world) {
        ProcessMesh mesh(world, {.dp = c.dp, .pp = c.pp});
        PipelineRig rig(pipeline_settings(tied), c, mesh);
        weights.add(rig.parallel->owned(), &Owned::master);
      });
      return weights.get();
    };
    Tensors one = first_weights({"afab", 1, 4});
    for (const PipelineCase& c :
         {PipelineCase{"1f1b", 2}, {"interleaved", 4}, {"zb-v", 2}, {"1f1b", 8, 4, 2, Sync::Zero1}})
      expect_bitwise(first_weights(c), one);
    EXPECT_NE(one.at("model.layers.0.mlp.up_proj.weight"),
              one.at("model.layers.8.mlp.up_proj.weight"));
  }
}

// The source's cases: layers over stages.
TEST(Pipeline, Pitfall71_EveryLayerIsOnExactlyOneStage) {
  auto counts = [](int64_t layers, int stages) {
    std::vector<int64_t> out;
    int64_t next = 0;
    for (const StageSpan& span : split_layers(layers, {Placement::Loop, stages, 1})) {
      EXPECT_EQ(span.first_layer, next);
      EXPECT_EQ(span.embedding, out.empty());
      EXPECT_EQ(span.head, int(out.size()) == stages - 1);
      out.push_back(span.layers);
      next += span.layers;
    }
    EXPECT_EQ(next, layers);
    return out;
  };
  EXPECT_EQ(counts(30, 4), (std::vector<int64_t>{8, 8, 7, 7}));
  EXPECT_EQ(counts(10, 3), (std::vector<int64_t>{4, 3, 3}));
  EXPECT_EQ(counts(7, 2), (std::vector<int64_t>{4, 3}));
  EXPECT_EQ(counts(8, 2), (std::vector<int64_t>{4, 4}));
  expect_refusal([&] { counts(2, 4); }, {"2 layers", "4 stages", "at most 2"});
  LayoutRig::Settings s = pipeline_settings();
  for (auto [layers, pp] : {std::pair{10, 3}, {7, 2}}) {
    s.config.layers = layers;
    Trained run = train_pipeline({"1f1b", pp, 4}, s), one = train_plain(1, 4, s);
    expect_bitwise(run.gradients, one.gradients);  // the same names, each element counted once
  }
}

// A vocabulary as large as several layers does not make a stage without a layer.
TEST(Pipeline, Pitfall72_NoStageIsEmpty) {
  expect_refusal(
      [] {
        split_layers(2, {Placement::Loop, 4, 1}, {.head = 50});
      },
      {"2 layers", "4 stages"});
  expect_refusal([] { split_layers(6, {Placement::V, 4, 2}); }, {"6 layers", "8 stages"});
  for (int64_t layers : {4, 5, 9, 30})
    for (double head : {0., 0.3, 4., 50.})
      for (const StageSpan& span : split_layers(layers, {Placement::Loop, 4, 1}, {.head = head}))
        EXPECT_GE(span.layers, 1) << layers << " " << head;
}

// 64 sequences in 3 micro-batches: 22, 21 and 21.
TEST(Pipeline, Pitfall73_UnevenMicroBatches) {
  EXPECT_EQ(flowing(deep_config(), {}, 3)[0].sequences, 22);
  EXPECT_EQ(flowing(deep_config(), {}, 3)[2].sequences, 21);
  Trained one = train_plain(1, 1, pipeline_settings());
  for (const char* schedule : {"afab", "1f1b", "zb-h1", "zb-h2", "zb-v"}) {
    SCOPED_TRACE(schedule);
    expect_same(train_pipeline({schedule, 2, 3}, pipeline_settings()), one);
  }
}

// Four micro-batches of equally many tokens whose gradients would be 1, 2, 3 and 4: each one's loss
// is divided by all tokens before backward.
TEST(Pipeline, Pitfall74_GradientsOfAllMicroBatchesAreAveragedOnce) {
  auto batches = flowing(deep_config(), {}, 4);
  auto alone = [&](size_t i) {  // the mean gradient of one micro-batch
    Whole gradients;
    run_threads(1, Device::CPU, {}, [&](Communicator& world) {
      ProcessMesh mesh(world, {});
      PipelineRig rig(pipeline_settings(), {"afab", 1, 1}, mesh);
      rig.gradients({batches[i]});
      gradients.add(rig.parallel->owned(), &Owned::grad);
    });
    return gradients.get();
  };
  std::vector<double> valid;
  Tensors mean;
  double all = 0;
  for (size_t i = 0; i < 4; ++i) {
    double n = 0;
    for (int32_t t : batches[i].targets.values<int32_t>()) n += t >= 0;
    for (auto& [name, g] : alone(i)) {
      auto& sum = mean[name];
      sum.resize(g.size());
      for (size_t k = 0; k < g.size(); ++k) sum[k] += n * g[k];
    }
    all += n;
  }
  for (auto& [name, g] : mean)
    for (double& x : g) x /= all;
  for (size_t calls : {size_t(1), size_t(2)})
    for (const char* schedule : {"afab", "1f1b", "zb-h1", "interleaved"}) {
      SCOPED_TRACE(text(schedule, " in ", calls, " calls"));
      Whole gradients;
      run_threads(2, Device::CPU, {}, [&](Communicator& world) {
        ProcessMesh mesh(world, {.pp = 2});
        PipelineRig rig(pipeline_settings(), {schedule, 2, 4}, mesh);
        for (int step = 0; step < 2; ++step) rig.gradients(batches, {}, calls);  // zeroed between
        gradients.add(rig.parallel->owned(), &Owned::grad);
      });
      for (const auto& [name, g] : gradients.get())
        EXPECT_LE(relative_error(g, mean.at(name)), 1e-5) << name;
    }
}

TEST(Pipeline, Pitfall75_TiedTableOnBothEndsStaysOne) {
  LayoutRig::Settings s = pipeline_settings(true);
  Trained one = train_plain(1, 4, s, 10);
  const std::string table = "model.embed_tokens.weight";
  for (const PipelineCase& c : {PipelineCase{"1f1b", 2},
                                {"1f1b", 2, 4, 1, Sync::Overlapped},
                                {"zb-h1", 4, 4, 2, Sync::Zero1},
                                {"interleaved", 2},
                                {"zb-v", 2, 4, 2, Sync::Zero1},
                                {"1f1b", 2, 4, 2, Sync::Naive}}) {
    SCOPED_TRACE(c.name());
    std::mutex mutex;
    std::array<std::set<std::vector<float>>, 10> copies;  // after each step
    run_threads(c.ranks(), Device::CPU, {.time_limit = 20}, [&](Communicator& world) {
      ProcessMesh mesh(world, {.dp = c.dp, .pp = c.pp});
      PipelineRig rig(s, c, mesh);
      int tables = 0;
      for (int step = 0; step < 10; ++step) {
        rig.gradients(flowing(s.config, {mesh.here().dp, c.dp}, 4, step));
        rig.update();
        for (Stage* stage : rig.chunks)
          for (Unit* unit : stage->units())
            rig.parallel->acquire(*unit, DataParallel::Pass::Evaluation);
        for (Stage* stage : rig.chunks)
          for (Parameter* p : stage->parameters())
            if (p->name == table) {
              std::lock_guard lock(mutex);
              ++tables;
              copies[size_t(step)].insert(p->value.values<float>());
            }
      }
      bool ends = rig.pipeline->has_last_stage() || mesh.here().pp == 0;
      EXPECT_EQ(tables, ends ? 10 : 0);
    });
    for (const auto& versions : copies) EXPECT_EQ(versions.size(), 1u);
    EXPECT_EQ(std::set(copies.begin(), copies.end()).size(), 10u);  // it has learnt
    // Counted once in parameters (Whole checks) and in the norm.
    expect_same(train_pipeline(c, s, 10), one);
  }
}

// Whichever rank prints.
TEST(Pipeline, Pitfall80_EveryRankKnowsTheLoss) {
  double one = train_plain(1, 4, pipeline_settings()).losses[0];
  for (const char* schedule : {"1f1b", "zb-v"})
    run_threads(4, Device::CPU, {}, [&](Communicator& world) {
      ProcessMesh mesh(world, {.dp = 2, .pp = 2});
      PipelineRig rig(pipeline_settings(), {schedule, 2, 4, 2}, mesh);
      rig.gradients(flowing(deep_config(), {mesh.here().dp, 2}, 4));
      rig.update();
      EXPECT_NEAR(rig.state().loss, one, 1e-6 * one) << "rank " << world.rank();
    });
}

TEST(Pipeline, EvaluationIsThatOfOneRank) {
  auto batches = flowing(deep_config(), {}, 3);
  double one = 0;
  for (const PipelineCase& c : {PipelineCase{"afab", 1, 3},
                                {"1f1b", 4, 3},
                                {"interleaved", 2, 4},
                                {"zb-v", 2, 3},
                                {"dualpipe-v", 2, 4}})
    run_threads(c.ranks(), Device::CPU, {}, [&](Communicator& world) {
      ProcessMesh mesh(world, {.pp = c.pp});
      PipelineRig rig(pipeline_settings(), c, mesh);
      double sum = 0;
      int calls = 0;
      rig.pipeline->evaluate(batches, rig.one, [&](const Tensor& loss) {
        sum += doubles(loss)[0];
        ++calls;
      });
      EXPECT_EQ(calls, rig.pipeline->has_last_stage() ? 3 : 0);
      if (c.pp == 1) one = sum;
      if (calls > 0) {
        EXPECT_DOUBLE_EQ(sum, one) << c.name();
      }
    });
}

TEST(Pipeline, WrongNumbersOfRanksAndChunksAreRefused) {
  run_threads(2, Device::CPU, {}, [&](Communicator& world) {
    ProcessMesh mesh(world, {.pp = 2});
    PipelineRig rig(pipeline_settings(), {"1f1b", 2}, mesh);
    Placement four{Placement::Loop, 4, 1};
    expect_refusal(
        [&] {
          Pipeline(rig.chunks, mesh.pp(), {four, {}});
        },
        {"4 ranks with 1 chunks", "there are 2 with 1"});
  });
}

}  // namespace
}  // namespace lockstep
