// Ranks as processes. What all backends promise is in comm_contract.h; here is what MPI adds: the
// same bits as ranks that are threads, messages in pieces, a helper that works while its rank
// computes and sleeps otherwise, and time limits. Runs under mpirun with 1, 2, 3 and 4 ranks.

#include <gtest/gtest.h>

#include <chrono>
#include <ctime>
#include <thread>

#include "common/random.h"
#include "common/ranks.h"
#include "tests/comm_contract.h"
#include "tests/mpi/main.h"
#include "tests/temporary.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void expect_none(const Complaints& complaints) {
  for (const std::string& sentence : complaints) ADD_FAILURE() << sentence;
}

// Numbers of many magnitudes, so that the order of a sum shows in its bits.
Tensor numbers(int rank, int64_t count, DType t) {
  RandomStream draw(uint64_t(rank), "numbers");
  return filled(t, {count}, Device::CPU, [&](int64_t i) {
    auto x = draw.at(uint64_t(i)).x;
    if (t == DType::I32) return double(int32_t(x[0] % 2000001u) - 1000000);
    return (double(x[0]) / 4294967296.0 - 0.5) * double(1 << (x[1] % 12));
  });
}

std::vector<std::byte> bytes_of(const Tensor& t) {
  return std::vector<std::byte>(t.raw(), t.raw() + t.bytes());
}

// What ranks that are threads get: their inputs are made again here.
std::vector<std::byte> sum_over_threads(int ranks, int64_t count, DType t) {
  std::vector<std::byte> sum;
  run_threads(ranks, Device::CPU, {}, [&](Communicator& world) {
    Tensor mine = numbers(world.rank(), count, t);
    world.all_reduce(mine).wait();
    if (world.rank() == 0) sum = bytes_of(mine);
  });
  return sum;
}

const int64_t kSizes[] = {0, 1, 2, 3, 5, 1000, 100003};

void expect_the_bits_of_threads(Communicator& world) {
  for (DType t : kMessageTypes)
    for (int64_t count : kSizes) {
      Tensor mine = numbers(world.rank(), count, t);
      world.all_reduce(mine).wait();
      EXPECT_EQ(bytes_of(mine), sum_over_threads(world.size(), count, t))
          << count << " " << name_of(t);
    }
}

TEST(Mpi, KeepsTheContract) { expect_none(check_contract(*fresh_world(), {})); }

TEST(Mpi, RanksAgreeBeforeEachCall) {
  expect_none(check_agreement(*fresh_world({.time_limit = 20, .check_calls = true}), Device::CPU));
}

TEST(Mpi, ChangedBuffersAreFound) {
  expect_none(check_unchanged_buffers(*fresh_world({.time_limit = 20, .check_buffers = true}),
                                      Device::CPU));
}

TEST(Mpi, SumsHaveTheBitsOfThreads) { expect_the_bits_of_threads(*fresh_world()); }

TEST(Mpi, LongMessagesTravelInPieces) {
  auto world = fresh_world({.time_limit = 20}, 1000);
  expect_the_bits_of_threads(*world);
  expect_none(check_values(*world, Device::CPU));
}

TEST(Mpi, Pitfall131_SixteenBitSumsAreFp32RoundedOnce) {
  expect_none(check_sixteen_bit_sums(*fresh_world(), Device::CPU));
}

// 2 MiB do not leave at once: somebody has to call MPI again and again.
TEST(Mpi, MessagesMoveWhileTheRankComputes) {
  auto world = fresh_world();
  if (world->size() > this_job().host().cores * this_job().host().ranks) return;
  bool overlapped = false;
  for (int attempt = 0; attempt < 10 && !overlapped; ++attempt) {  // the machine may be busy
    Tensor t = numbers(world->rank(), 1 << 19, DType::F32);
    world->barrier();
    Work sum = world->all_reduce(t);
    auto start = Clock::now();
    while (seconds_since(start) < 0.2) {
    }
    start = Clock::now();
    sum.wait();
    Tensor slow = Tensor::from(std::vector<int32_t>{seconds_since(start) >= 0.02}, {1});
    world->all_reduce(slow, ReduceOp::Max).wait();  // so that all ranks try as often
    overlapped = slow.values<int32_t>()[0] == 0;
  }
  EXPECT_TRUE(overlapped);
}

TEST(Mpi, HelperSleepsWhenThereIsNothingToDo) {
  auto world = fresh_world();
  world->barrier();
  std::this_thread::sleep_for(std::chrono::milliseconds(50));
  std::clock_t before = std::clock();  // CPU time of the process
  std::this_thread::sleep_for(std::chrono::milliseconds(500));
  EXPECT_LT(double(std::clock() - before) / CLOCKS_PER_SEC, 0.05);
}

// The last rank is late: the others name it, and what they were waiting for.
TEST(Mpi, TimeLimitNamesTheRankThatNeverCame) {
  auto world = fresh_world({.time_limit = 0.3});
  int last = world->size() - 1;
  if (last == 0) return;
  Tensor t = numbers(world->rank(), 1000, DType::F32);
  if (world->rank() < last) {
    auto start = Clock::now();
    expect_refusal([&] { world->all_reduce(t).wait(); },
                   {"waited 0.3 s for all_reduce (number 0 in \"world\")",
                    text("to which rank ", last, " never came")});
    EXPECT_GE(seconds_since(start), 0.3);
    EXPECT_LT(seconds_since(start), 3);
  } else {
    std::this_thread::sleep_for(std::chrono::milliseconds(1500));
    world->all_reduce(t).wait();  // the helpers of the others are still there
  }
}

TEST(Mpi, UnequalSizesAreFoundWhereTheyMeet) {
  auto world = fresh_world({.time_limit = 2});
  if (world->size() == 1) return;
  int64_t count = world->rank() == 1 ? 800 : 400;
  Tensor t = numbers(world->rank(), count, DType::F32);
  if (world->rank() <= 1)  // others may wait in vain for a part of it
    expect_refusal([&] { world->all_reduce(t).wait(); },
                   {"expects ", " bytes from rank ", "all_reduce (number 0 in \"world\")"});
}

// Splitting blocks the helper. What is under way before it must neither block it nor be lost.
TEST(Mpi, GroupsAreMadeWhileMessagesAreUnderWay) {
  auto world = fresh_world();
  Tensor t = numbers(world->rank(), 100003, DType::F32);
  Work sum = world->all_reduce(t);
  if (world->rank() % 2 == 0) sum.wait();
  auto half = world->split(world->rank() % 2, -world->rank(), "half");
  Tensor count = Tensor::from(std::vector<int32_t>{1}, {1});
  Work counted = half->all_reduce(count);
  sum.wait();
  counted.wait();
  EXPECT_EQ(count.values<int32_t>()[0], half->size());
  EXPECT_EQ(half->size(), (world->size() + 1 - world->rank() % 2) / 2);
  EXPECT_EQ(half->rank(), half->size() - 1 - world->rank() / 2);
  EXPECT_EQ(bytes_of(t), sum_over_threads(world->size(), 100003, DType::F32));
}

}  // namespace
}  // namespace lockstep
