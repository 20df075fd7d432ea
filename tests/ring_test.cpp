// The all-reduce by hand: what it computes, and what it sends.

#include <gtest/gtest.h>

#include "02_data_parallel/ring_all_reduce.h"
#include "common/ranks.h"

namespace lockstep {
namespace {

constexpr int64_t kLength = 840;  // divided evenly by 1 to 8 ranks

TEST(Ring, C8_SendsTwiceTheBufferLessTwoParts) {
  for (int n : {1, 2, 3, 4, 5, 8}) {
    run_threads(n, Device::CPU, {}, [n](Communicator& world) {
      std::vector<float> mine;
      for (int64_t i = 0; i < kLength; ++i) mine.push_back(float((world.rank() + 1) * (i % 7 + 1)));
      Tensor buffer = Tensor::from(mine, {kLength});
      world.ledger().clear();
      ring_all_reduce(world, buffer);
      std::vector<float> sum = buffer.values<float>();
      for (int64_t i = 0; i < kLength; ++i)  // whole numbers: exact in any order
        require(sum[size_t(i)] == float(n * (n + 1) / 2 * (i % 7 + 1)), "element ", i, " is ",
                sum[size_t(i)]);
      Ledger::Sum sent = world.ledger().sum(Collective::Exchange);
      require(sent.calls == 2 * (n - 1), sent.calls, " messages");
      require(sent.wire == 2 * (n - 1) * kLength * 4 / n, sent.wire, " bytes");
    });
  }
}

// Lengths that ranks do not divide, shorter ones too: some parts are empty.
TEST(Ring, AnyLengthAndType) {
  for (int64_t length : {0, 1, 2, 5, 13}) {
    run_threads(4, Device::CPU, {}, [length](Communicator& world) {
      std::vector<int32_t> mine(size_t(length), world.rank() + 1);
      Tensor whole = Tensor::from(mine, {length});
      ring_all_reduce(world, whole);
      for (int32_t x : whole.values<int32_t>()) require(x == 10, "a sum of ", x);
      Tensor largest = Tensor::from(mine, {length});
      ring_all_reduce(world, largest, ReduceOp::Max);
      for (int32_t x : largest.values<int32_t>()) require(x == 4, "a maximum of ", x);
    });
  }
}

TEST(Ring, AllRanksGetTheSameBits) {
  std::vector<std::vector<float>> results(4);
  run_threads(4, Device::CPU, {}, [&](Communicator& world) {
    Tensor buffer = Tensor::empty({1001}, DType::F32, Device::CPU);
    on(buffer).fill_normal(buffer, 1, RandomStream(uint64_t(world.rank()), "x"), {}, 0);
    ring_all_reduce(world, buffer);
    results[size_t(world.rank())] = buffer.values<float>();
  });
  for (int r = 1; r < 4; ++r) EXPECT_EQ(results[size_t(r)], results[0]);
}

}  // namespace
}  // namespace lockstep
