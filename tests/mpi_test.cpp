// Ranks as processes. What all backends promise is in comm_contract.h; here is what MPI adds: the
// same bits as ranks that are threads, messages in pieces, a helper that works while its rank
// computes and sleeps otherwise, and time limits. Runs under mpirun with 1, 2, 3 and 4 ranks.

#include <gtest/gtest.h>

#include <chrono>
#include <ctime>
#include <thread>

#include "common/device.h"
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
    Random4 r = draw.at(uint64_t(i));
    if (t == DType::I32) return double(int32_t(r.x[0] % 2000001u) - 1000000);
    return (RandomStream::unit(r.x[0]) - 0.5) * double(1 << (r.x[1] % 12));
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

TEST(Mpi, C12_KeepsTheContractOfAllBackends) { expect_none(check_contract(*fresh_world(), {})); }

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

// Pieces that do not fit to each other would be found.
TEST(Mpi, PiecesAreAsLongAsTheyShouldBe) {
  auto world = fresh_world({.time_limit = 2}, this_job().rank() == 0 ? 400 : 300);
  Tensor t = numbers(0, 200, DType::F32);
  if (world->size() > 1 && world->rank() < 2) {
    auto from_0_to_1 = [&] {
      P2P::Kind kind = world->rank() == 0 ? P2P::Send : P2P::Receive;
      world->exchange({{kind, 1 - world->rank(), t}}).wait();
    };
    if (world->rank() == 0) {
      from_0_to_1();
    } else {
      expect_refusal(from_0_to_1, {"expects 300 bytes from rank 0 in exchange", "sent more"});
    }
  }
}

// The shard is a part of the whole.
void expect_reduce_scatter_in_place(Communicator& world, Device device) {
  int64_t each = 1000;
  Tensor whole = numbers(world.rank(), each * world.size(), DType::F32).to(device);
  Tensor shard = whole.flat(world.rank() * each, each);
  world.reduce_scatter(whole, shard).wait();
  Tensor sum = numbers(world.rank(), each * world.size(), DType::F32);
  world.all_reduce(sum).wait();
  EXPECT_EQ(shard.values<float>(), sum.flat(world.rank() * each, each).values<float>());
}

TEST(Mpi, ReducesAndScattersInPlace) {
  expect_reduce_scatter_in_place(*fresh_world(), Device::CPU);
}

TEST(Mpi, Pitfall130_TensorsOnAGpuGoThroughTheHost) {
  if (!device::available()) GTEST_SKIP() << "no GPU";
  auto world = fresh_world();
  expect_none(check_contract(*world, {.device = Device::CUDA}));
  expect_reduce_scatter_in_place(*world, Device::CUDA);
}

TEST(Mpi, Pitfall131_SixteenBitSumsAreFp32RoundedOnce) {
  expect_none(check_sixteen_bit_sums(*fresh_world(), Device::CPU));
}

// How long a rank waits for the sum of 16 MiB after it has computed for `computes` seconds; the
// slowest rank counts.
double seconds_of_waiting(Communicator& world, const Tensor& t, double computes) {
  world.barrier();
  Work sum = world.all_reduce(t);
  auto start = Clock::now();
  while (seconds_since(start) < computes) {
  }
  start = Clock::now();
  sum.wait();
  Tensor slowest = Tensor::from(std::vector<float>{float(seconds_since(start))}, {1});
  world.all_reduce(slowest, ReduceOp::Max).wait();
  return slowest.values<float>()[0];
}

TEST(Mpi, MessagesMoveWhileTheRankComputes) {
  auto world = fresh_world();
  if (this_job().host().crowded || world->size() == 1) return;
  Tensor t = numbers(world->rank(), 1 << 22, DType::F32);
  double best = 1;  // the machine may be busy with something else
  for (int attempt = 0; attempt < 10 && best > 0.25; ++attempt) {
    double alone = seconds_of_waiting(*world, t, 0);
    best = std::min(best, seconds_of_waiting(*world, t, 0.05 + 4 * alone) / alone);
  }
  EXPECT_LE(best, 0.25) << "of the time that it takes when the rank only waits";
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
  auto alone = half->split(half->rank(), 0, "alone");
  alone->barrier();
  EXPECT_EQ(alone->ledger().entries().back().members, std::vector<int>{world->rank()});
  EXPECT_EQ(bytes_of(t), sum_over_threads(world->size(), 100003, DType::F32));
}

}  // namespace
}  // namespace lockstep
