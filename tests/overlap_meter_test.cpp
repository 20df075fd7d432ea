// The meter against operations whose lengths are known: what is hidden, what is exposed, and what
// is counted. Sleeping takes as long as asked or longer, never less, so that bounds from above are
// generous.

#include "common/overlap_meter.h"

#include <gtest/gtest.h>

#include "common/ranks.h"
#include "tests/slow_communicator.h"
#include "tests/temporary.h"

namespace lockstep {
namespace {

void compute(int milliseconds) {
  std::this_thread::sleep_for(std::chrono::milliseconds(milliseconds));
}

class Meter : public ::testing::Test {
 protected:
  std::shared_ptr<Ledger> ledger_ = std::make_shared<Ledger>();
  SlowCommunicator dp_{ledger_}, tp_{ledger_, "tp"};
  OverlapMeter meter_{*ledger_, Device::CPU};
};

TEST_F(Meter, WhatTheRankWaitsForIsExposed) {
  dp_.slow(40).wait();
  OverlapMeter::Sum sum = meter_.read().sum();
  EXPECT_EQ(sum.operations, 1);
  EXPECT_EQ(sum.payload, 4);
  EXPECT_NEAR(sum.under_way, 0.040, 0.005);
  EXPECT_GE(sum.exposed, 0.039);
  EXPECT_LT(sum.exposed, 0.200);
  EXPECT_GT(sum.exposed_share(), 0.95);
  EXPECT_LE(sum.exposed_share(), 1);
}

TEST_F(Meter, WhatTheRankComputesBesideIsHidden) {
  Work long_one = dp_.slow(200);
  compute(100);
  long_one.wait();
  OverlapMeter::Sum sum = meter_.read().sum();
  EXPECT_NEAR(sum.under_way, 0.200, 0.005);
  EXPECT_LT(sum.exposed, 0.180);  // 100, and what the machine adds
  EXPECT_LT(sum.exposed_share(), 0.9);

  Work short_one = dp_.slow(10);
  compute(20);
  short_one.wait();
  sum = meter_.read().sum();
  EXPECT_NEAR(sum.under_way, 0.010, 0.005);
  EXPECT_LT(sum.exposed, 0.008);
}

TEST_F(Meter, OperationsAtOnceCountOnce) {
  Work a = dp_.slow(60), b = tp_.slow(80);
  b.wait();
  a.wait();
  OverlapMeter::Reading reading = meter_.read();
  OverlapMeter::Sum sum = reading.sum();
  EXPECT_EQ(sum.operations, 2);
  EXPECT_GE(sum.under_way, 0.079);
  EXPECT_LT(sum.under_way, 0.120);  // not 140
  EXPECT_GE(sum.exposed, 0.070);
  EXPECT_NEAR(reading.sum("dp").under_way, 0.060, 0.005);
  EXPECT_LT(reading.sum("dp").exposed, 0.05);  // it was over before its rank asked for it
}

TEST_F(Meter, SumsByGroupAndSize) {
  dp_.slow(1, 1000).wait();
  dp_.slow(1, 1).wait();
  tp_.slow(1, 10).wait();
  dp_.barrier();
  OverlapMeter::Reading reading = meter_.read();
  EXPECT_EQ(reading.sum().operations, 4);
  EXPECT_EQ(reading.sum("dp").operations, 3);
  EXPECT_EQ(reading.sum("dp").payload, 4004);
  EXPECT_EQ(reading.sum("", 40).operations, 2);
  EXPECT_EQ(reading.sum("dp", 40).payload, 4000);
  EXPECT_EQ(reading.sum("pp").operations, 0);
  EXPECT_EQ(reading.sum("pp").exposed_share(), 0);
  // The barrier is nothing but standing still.
  EXPECT_EQ(reading.operations[3].operation, Collective::Barrier);
  EXPECT_GE(reading.operations[3].exposed, 20'000'000);
}

TEST_F(Meter, AReadingBeginsWhereTheLastOneEnded) {
  dp_.slow(1).wait();
  Work under_way = dp_.slow(1);
  EXPECT_EQ(meter_.read().sum().operations, 1);
  EXPECT_EQ(meter_.read().sum().operations, 0);
  under_way.wait();
  EXPECT_EQ(meter_.read().sum().operations, 1);
}

TEST_F(Meter, ALineForPeople) {
  OverlapMeter::Sum sum{.operations = 4, .payload = 0, .under_way = 0.032, .exposed = 0.004};
  EXPECT_EQ(line(sum, 2), "communication 16.0 ms a step, 2.0 ms of it exposed (12.5 %)");
  EXPECT_EQ(line({}, 0), "communication 0.0 ms a step, 0.0 ms of it exposed (0.0 %)");
}

TEST_F(Meter, OneMeterForARankAtATime) {
  expect_refusal([&] { OverlapMeter second(*ledger_, Device::CPU); }, {"another meter"});
}

TEST(OverlapMeter, NobodyAsksAndNothingIsMeasured) {
  auto ledger = std::make_shared<Ledger>();
  SlowCommunicator dp(ledger), alone(ledger, "alone", 1);
  Work before = dp.slow(1);
  EXPECT_FALSE(dp.measured);
  {
    OverlapMeter meter(*ledger, Device::CPU);
    before.wait();
    alone.slow(1).wait();  // one rank has nothing to move
    EXPECT_EQ(meter.read().sum().operations, 0);
    before = dp.slow(1);
    EXPECT_TRUE(dp.measured);
  }
  before.wait();  // its meter is gone
  dp.slow(1).wait();
  EXPECT_FALSE(dp.measured);
}

// Where ranks are threads, all is exposed, and so is the delay of a late rank.
TEST(OverlapMeter, ThreadsHideNothing) {
  run_threads(2, Device::CPU, {}, [](Communicator& world) {
    OverlapMeter meter(world.ledger(), Device::CPU);
    world.barrier();
    if (world.rank() == 1) compute(40);
    Tensor t = Tensor::zeros({100000}, DType::F32, Device::CPU);
    Work sum = world.all_reduce(t);
    if (world.rank() == 0) compute(5);  // hides nothing
    sum.wait();
    OverlapMeter::Sum read = meter.read().sum("world", t.bytes());
    EXPECT_EQ(read.operations, 1);
    EXPECT_DOUBLE_EQ(read.exposed_share(), 1);
    EXPECT_NEAR(read.under_way, read.exposed, 1e-6);
    if (world.rank() == 0) {
      EXPECT_GE(read.exposed, 0.020);
    }
  });
}

}  // namespace
}  // namespace lockstep
