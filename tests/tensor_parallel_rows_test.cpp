// Sequence parallelism: which rows a rank has, and what becomes of the few parameters that all
// ranks have whole.

#include "common/checks.h"
#include "tests/temporary.h"
#include "tests/tensor_parallel_cases.h"

namespace lockstep {
namespace {

const TensorModel kModel{.kv_heads = 2, .biases = true};

TensorCase spread(int tp, Sync sync = Sync::Naive, TensorModel model = kModel) {
  return {tp, 1, kVariants[1], sync, model};
}
// What a trainer does that forgets: gains and row biases keep the gradient of a rank's own rows.
void forget_the_sum(Parts& parts) { parts.stream = {Axis::Data}; }

bool is_replicated(const std::string& name) {
  return name.find("norm") != std::string::npos || name.ends_with("o_proj.bias") ||
         name.ends_with("down_proj.bias");
}

TEST(TensorParallelRows, Pitfall39_NormAndBiasGradientsAreTheSameBitsOnAllRanks) {
  const Trained one = one_rank(kModel, 1);
  for (const Variant& variant : kVariants)
    for (Sync sync : {Sync::Naive, Sync::Bucketed})
      for (int ranks : {2, 4, 8}) {
        SCOPED_TRACE(text("TP", ranks, " ", variant.name, " ", name_of(sync)));
        TensorCase c = spread(ranks, sync);
        c.variant = variant;
        std::vector<Tensors> gradients{size_t(ranks)};
        run_threads(ranks, Device::CPU, {.time_limit = 10}, [&](Communicator& world) {
          ProcessMesh mesh(world, c.shape(), c.model.kv_heads);
          LayoutRig rig(settings_of(c), mesh);
          rig.gradients(dealt(rig.settings.config, {}, 1, 0, Device::CPU, 8));
          for (const Owned& o : rig.parallel->owned())
            if (is_replicated(o.parameter->name))
              gradients[size_t(world.rank())][o.parameter->name] = doubles(o.grad);
          for (int step = 1; step <= 10; ++step)
            rig.step(dealt(rig.settings.config, {}, 1, step, Device::CPU, 8));
          check_replicas({rig.model.get()}, *rig.parallel, mesh, 10);
        });
        ASSERT_EQ(gradients[0].size(), 2 * 4 + 1u);
        for (const Tensors& of_rank : gradients) {
          expect_bitwise(of_rank, gradients[0]);
          for (const auto& [name, g] : of_rank)
            EXPECT_LE(relative_error(g, one.gradients.at(name)), 1e-5) << name;
        }
      }
}

// The gradients are wrong, and different on each rank; from the first step on the copies are, too.
// The loss still falls.
TEST(TensorParallelRows, T9_WithoutTheSumOfNormGradientsReplicasDrift) {
  const Trained one = one_rank(kModel, 1);
  for (Sync sync : {Sync::Naive, Sync::Zero3}) {
    LayoutRig::Settings s = settings_of(spread(2, sync));
    s.rule.schedule.peak = 1e-2f;
    double first = 0, last = 0;
    auto run = [&] {
      run_threads(2, Device::CPU, {.time_limit = 10}, [&](Communicator& world) {
        ProcessMesh mesh(world, {.tp = 2}, s.config.kv_heads);
        LayoutRig rig(s, mesh);
        for (int step = 0; step < 20; ++step) {
          rig.step(dealt(s.config, {}, 1, 0, Device::CPU, 8));
          if (world.rank() == 0) (step == 0 ? first : last) = rig.state().loss;
        }
        check_replicas({rig.model.get()}, *rig.parallel, mesh, 20);
      });
    };
    EXPECT_NO_THROW(run());
    s.more = forget_the_sum;
    expect_refusal(run, {"rank 1's copy of ", "norm", " differs from rank 0's"});
    EXPECT_LT(last, 0.9 * first);
    Trained wrong = train({.tp = 2}, s, 1, 1);
    for (const auto& [name, g] : one.gradients) {
      double error = relative_error(wrong.gradients.at(name), g);
      if (is_replicated(name)) {
        EXPECT_GT(error, 0.1) << name;
      } else {
        EXPECT_LE(error, 1e-5) << name;  // whoever looks at matrices only sees nothing
      }
    }
  }
}

// Without sequence parallelism every rank has all rows: a sum over TP would count them twice.
TEST(TensorParallelRows, T9_WithWholeRowsTheSumWouldBeTooMuch) {
  const Trained one = one_rank(kModel, 1);
  TensorCase c = spread(2);
  c.variant = kVariants[0];
  LayoutRig::Settings s = settings_of(c);
  expect_same(train({.tp = 2}, s, 1, 1), one, {.weight = 1e-5});
  s.more = [](Parts& parts) { parts.stream = {Axis::Data, Axis::TP}; };
  Trained wrong = train({.tp = 2}, s, 1, 1);
  const std::string gain = "model.layers.0.input_layernorm.weight";
  for (size_t i = 0; i < one.gradients.at(gain).size(); ++i)
    EXPECT_NEAR(wrong.gradients[gain][i], 2 * one.gradients.at(gain)[i], 1e-5);
}

// --- Dropout -----------------------------------------------------------------------------------

// A mask is a function of the row in the run and the column in the model. So ranks with the same
// rows drop the same elements, and ranks with parts of them the parts of one mask.
TEST(TensorParallelRows, T10_AMaskIsAFunctionOfTheGlobalIndex) {
  constexpr int64_t kRows = 8, kWidth = 12;
  const RandomStream stream(7, "dropout");
  auto masked = [&](Range rows, Range columns) {
    std::vector<int64_t> numbers;
    for (int64_t i = 0; i < rows.count; ++i) numbers.push_back(100 + rows.first + i);
    Tensor ones = Tensor::empty({rows.count, columns.count}, DType::F64, Device::CPU);
    on(ones).fill(ones, 1);
    Tape tape;
    return dropout(tape, {ones}, Tensor::from(numbers, {rows.count}), 0.5, stream, kWidth,
                   columns.first)
        .value.values<double>();
  };
  const std::vector<double> whole = masked({0, kRows}, {0, kWidth});
  EXPECT_EQ(masked({0, kRows}, {0, kWidth}), whole);
  EXPECT_GT(std::count(whole.begin(), whole.end(), 0.0), 20);
  for (int ranks : {2, 4})
    for (int r = 0; r < ranks; ++r) {
      Range rows = share(kRows, {r, ranks}), columns = share(kWidth, {r, ranks});
      std::vector<double> mine = masked(rows, {0, kWidth}), theirs;
      EXPECT_EQ(mine, std::vector<double>(whole.begin() + rows.first * kWidth,
                                          whole.begin() + (rows.first + rows.count) * kWidth));
      for (int64_t i = 0; i < kRows; ++i)
        for (int64_t j = 0; j < columns.count; ++j)
          theirs.push_back(whole[size_t(i * kWidth + columns.first + j)]);
      EXPECT_EQ(masked({0, kRows}, columns), theirs);
      // Counted from a rank's own first row or column, all ranks would have the first one's mask.
      if (r == 0) continue;
      EXPECT_NE(masked({0, rows.count}, {0, kWidth}), mine);
      EXPECT_NE(masked({0, kRows}, {0, columns.count}), theirs);
    }
}

TEST(TensorParallelRows, T10_MasksOfLocalRowsAreNoLongerThoseOfOneRank) {
  const TensorModel model{.kv_heads = 8, .dropout = true};
  const Trained one = one_rank(model, 1);
  for (const Variant& variant : kVariants) {
    TensorCase c = spread(2, Sync::Naive, model);
    c.variant = variant;
    expect_same(train({.tp = 2}, settings_of(c), 1, 1), one, {.weight = 1e-5});
  }
  LayoutRig::Settings s = settings_of(spread(2, Sync::Naive, model));
  s.more = [](Parts& parts) { parts.stream_rows.rank = 0; };  // every rank takes rank 0's numbers
  EXPECT_GT(std::abs(train({.tp = 2}, s, 1, 1).losses[0] - one.losses[0]), 1e-3);
}

// --- The gradient norm -------------------------------------------------------------------------

// Rank 0 has a matrix gradient of 3, rank 1 of 4, and both the gain's 12: 13, once counted.
TEST(TensorParallelRows, Pitfall37_NormCountsShardsOnceAndReplicasOnce) {
  for (const Variant& variant : kVariants)
    for (Sync sync : {Sync::Naive, Sync::Bucketed, Sync::Zero1, Sync::Zero3})
      run_threads(2, Device::CPU, {.time_limit = 10}, [&](Communicator& world) {
        SCOPED_TRACE(text(variant.name, " ", name_of(sync)));
        ProcessMesh mesh(world, {.tp = 2}, 8);
        TensorCase c{2, 1, variant, sync, {}};
        LayoutRig::Settings s = settings_of(c);
        s.rule.max_norm = 1;
        LayoutRig rig(s, mesh);
        rig.parallel->begin_step(1);
        rig.optimizer->begin_step(Tensor::from<int64_t>({1}, {1}));
        // With rows of its own, each rank has found half of the gain's gradient.
        float gain = variant.how.sequence_parallel ? 6 : 12;
        Weights order = rig.model->parameters();
        std::reverse(order.begin(), order.end());
        for (Parameter* p : order) {
          if (p->need_grad) p->need_grad(*p);
          float* grad = p->grad.data<float>();
          if (p->name == "model.layers.0.self_attn.q_proj.weight") grad[1] += 3.0f + world.rank();
          if (p->name == "model.norm.weight") grad[2] += gain;
          if (p->on_grad_ready) p->on_grad_ready(*p);
        }
        rig.parallel->finish();
        rig.update();
        EXPECT_EQ(rig.state().gradient_norm, 13.0);
        for (size_t i = 0; i < rig.optimizer->owned().size(); ++i)
          for (double m : doubles(rig.optimizer->moments()[i].m)) {
            double clipped = m / (1 - double(s.rule.beta1)) * 13;
            double nearest = std::round(clipped);
            EXPECT_NEAR(clipped, nearest, 1e-5);
            EXPECT_TRUE(nearest == 0 || nearest == 3.0 + world.rank() || nearest == 12) << clipped;
          }
      });
}

}  // namespace
}  // namespace lockstep
