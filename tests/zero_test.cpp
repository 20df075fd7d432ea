// What ZeRO's flat shards can get wrong: sizes that do not divide, padding, norms over pieces, and
// the order in which gathers start.

#include "tests/layout_cases.h"

namespace lockstep {
namespace {

// With its shards in the open.
template <class Zero>
struct Open : Zero {
  using Zero::sharding;
  using Zero::shards_;
  using Zero::Zero;
};
template <class Zero>
void make(LayoutRig::Settings& s) {
  s.make = [](std::vector<Stage*> chunks, ProcessMesh& mesh, DataParallel::Settings settings) {
    return std::make_unique<Open<Zero>>(chunks, mesh, settings);
  };
}

TEST(Zero, Pitfall27_ShardsAreEqualAndTheLastOnesPadded) {
  Sharding ten{10, 4}, nineteen{19, 8};
  EXPECT_EQ(ten.shard(), 3);
  EXPECT_EQ(nineteen.shard(), 3);
  for (int r = 0; r < 4; ++r) EXPECT_EQ(ten.pad_of(r), (std::array{0, 0, 0, 2}[size_t(r)]));
  for (int r = 0; r < 8; ++r)
    EXPECT_EQ(nineteen.pad_of(r), (std::array{0, 0, 0, 0, 0, 0, 2, 3}[size_t(r)]));
  for (int64_t n : {1, 10, 19, 24})
    for (int ranks : {1, 2, 3, 4, 8}) {
      Sharding s{n, ranks};
      EXPECT_EQ(s.pad(), (ranks - n % ranks) % ranks);  // (-n) mod N
      int64_t all = 0;
      for (int r = 0; r < ranks; ++r) all += s.pad_of(r);
      EXPECT_EQ(all, s.pad());
    }
}

// Gains of `hidden` elements, each in a bucket of its own. ZeRO-3 takes units: n is theirs.
template <class Zero>
void train_with_padding(int64_t hidden, int ranks) {
  LayoutRig::Settings s;
  s.config.hidden = hidden, s.config.heads = s.config.kv_heads = 1, s.config.head_dim = 2;
  s.parallel.bucket_bytes = 1;
  s.sync = Sync::Bucketed;
  Trained plain = train(ranks, s, 1, 5);
  make<Zero>(s);
  expect_same(train(ranks, s, 1, 5), plain);

  run_threads(ranks, Device::CPU, {.time_limit = 10}, [&](Communicator& world) {
    ProcessMesh mesh(world, {.dp = ranks});
    LayoutRig rig(s, mesh);
    auto& zero = static_cast<Open<Zero>&>(*rig.parallel);
    for (int step = 0; step < 5; ++step) {
      rig.gradients(dealt(s.config, {world.rank(), ranks}, 1, step));
      for (auto& shards : zero.shards_) {
        int64_t pad = zero.sharding(shards).pad_of(world.rank());
        for (const Tensor& t : {shards.value, shards.grad})
          for (double x : doubles(t.flat(t.size() - pad, pad))) EXPECT_EQ(x, 0) << "of padding";
        on(shards.grad).fill(shards.grad.flat(shards.grad.size() - pad, pad), 1e9);  // not counted
      }
      rig.update();
      EXPECT_NEAR(rig.state().gradient_norm, plain.norms[size_t(step)], 1e-5);
    }
    for (const Owned& o : zero.owned()) {
      bool own_bucket = o.parameter->name == "model.norm.weight" && !std::is_same_v<Zero, Zero3>;
      Sharding sharding{hidden, ranks};
      if (own_bucket) {
        EXPECT_EQ(o.value.size(), 3 - sharding.pad_of(world.rank()));
      }
    }
  });
}
TEST(Zero, Pitfall27_PaddingStaysZeroAndOutsideOfTheNorm) {
  train_with_padding<Zero1>(10, 4);
  train_with_padding<Zero2>(10, 4);
  train_with_padding<Zero3>(10, 4);
  train_with_padding<Zero1>(19, 8);
  train_with_padding<Zero2>(19, 8);
  train_with_padding<Zero3>(19, 8);
}

// After the reduce-scatter only the own shard is a sum; the rest of the whole gradient is what is
// left of the rank's own.
TEST(Zero, Pitfall29_NormIsOverOwnShardsOnly) {
  run_threads(2, Device::CPU, {.time_limit = 10}, [&](Communicator& world) {
    ProcessMesh mesh(world, {.dp = 2});
    LayoutRig::Settings s;
    make<Zero1>(s);
    LayoutRig rig(s, mesh);
    auto& shards = static_cast<Open<Zero1>&>(*rig.parallel).shards_;
    ASSERT_EQ(shards.size(), 1u);
    rig.gradients(dealt(s.config, {world.rank(), 2}, 1));
    on(shards[0].whole_grad).fill(shards[0].whole_grad, 1e6);
    zero(shards[0].grad);
    on(shards[0].grad).fill(shards[0].grad.flat(0, 1), world.rank() == 0 ? 3 : 4);
    rig.update();
    EXPECT_EQ(rig.state().gradient_norm, 5.0);
  });
}

// The last ranks own nothing of a bucket of 19 among 8, and so no optimizer step of theirs finishes
// it. Its gather must start when the others' does.
TEST(Zero, GathersDuringTheOptimizerStartInTheSameOrderOnAllRanks) {
  LayoutRig::Settings s;
  s.config.hidden = 19, s.config.heads = s.config.kv_heads = 1, s.config.head_dim = 2;
  s.parallel.bucket_bytes = 1;
  s.sync = Sync::Bucketed;
  Trained plain = train(8, s, 1, 5);
  Trained one = train(1, s, 1, 5);
  auto expect_equal = [&]<class Zero>() {
    s.make = [](std::vector<Stage*> chunks, ProcessMesh& mesh, DataParallel::Settings settings) {
      return std::make_unique<Zero>(chunks, mesh, settings, Zero1::Gather::DuringOptimizer);
    };
    expect_same(train(8, s, 1, 5, {.time_limit = 10, .check_calls = true}), plain);
    expect_same(train(1, s, 1, 5), one);
  };
  expect_equal.template operator()<Zero1>();
  expect_equal.template operator()<Zero2>();
  expect_equal.template operator()<Zero3>();
}

}  // namespace
}  // namespace lockstep
