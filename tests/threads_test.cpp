// The contract on ranks that are threads, and what happens when one of them fails.

#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <thread>

#include "common/ranks.h"
#include "tests/comm_contract.h"
#include "tests/temporary.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}
void sleep(double seconds) { std::this_thread::sleep_for(std::chrono::duration<double>(seconds)); }

// Runs a check in every rank; all their complaints are failures of the test.
void holds(int ranks, const std::function<Complaints(Communicator&)>& check,
           Communicator::Options options = {}) {
  std::mutex mutex;
  Complaints all;
  run_threads(ranks, Device::CPU, options, [&](Communicator& world) {
    Complaints mine = check(world);
    std::lock_guard lock(mutex);
    all.insert(all.end(), mine.begin(), mine.end());
  });
  for (const std::string& complaint : all) ADD_FAILURE() << complaint;
}

class Threads : public ::testing::TestWithParam<int> {};
INSTANTIATE_TEST_SUITE_P(Ranks, Threads, ::testing::Values(1, 2, 3, 4, 5, 8));

TEST_P(Threads, C12_KeepsTheContractOfAllBackends) {
  holds(GetParam(), [](Communicator& world) { return check_contract(world, {}); });
}
TEST_P(Threads, Pitfall126_DifferentSizesOrCallsAreNamed) {
  auto start = Clock::now();
  holds(GetParam(), [](Communicator& world) { return check_agreement(world, Device::CPU); },
        {.check_calls = true});
  EXPECT_LT(seconds_since(start), 10);
}
TEST_P(Threads, BuffersThatChangeWhileTheyAreSentAreFound) {
  holds(GetParam(), [](Communicator& world) { return check_unchanged_buffers(world, Device::CPU); },
        {.check_buffers = true});
}

void example(Complaints check(Communicator&, Device)) {
  holds(3, [&](Communicator& world) { return check(world, Device::CPU); });
}
TEST(Collectives, C1_Broadcast) { example(c1_broadcast); }
TEST(Collectives, C2_Reduce) { example(c2_reduce); }
TEST(Collectives, C3_AllReduce) { example(c3_all_reduce); }
TEST(Collectives, C4_GatherAndAllGather) { example(c4_gather); }
TEST(Collectives, C5_Scatter) { example(c5_scatter); }
TEST(Collectives, C6_ReduceScatterOfPowers) { example(c6_reduce_scatter); }
TEST(Collectives, C9_AllReduceIsReduceScatterAndAllGatherBitForBit) {
  holds(4, [](Communicator& world) {
    return c9_all_reduce_is_reduce_scatter_and_all_gather(world, {});
  });
}
TEST(Collectives, C10_AllToAllTwiceRestores) { example(c10_all_to_all_twice); }
TEST(Collectives, Pitfall131_SixteenBitSumsAreFp32SumsRoundedOnce) {
  for (int ranks : {2, 3, 4})
    holds(ranks, [](Communicator& world) { return check_sixteen_bit_sums(world, Device::CPU); });
}

TEST(Collectives, KeepTheContractWhileCallsAndBuffersAreChecked) {
  holds(4, [](Communicator& world) { return check_contract(world, {}); },
        {.check_calls = true, .check_buffers = true});
}

// Nobody leaves before the last has come, and all leave soon after it.
TEST(Collectives, C7_Barrier) {
  std::vector<double> came(3), left(3);
  auto start = Clock::now();
  run_threads(3, Device::CPU, {}, [&](Communicator& world) {
    size_t r = size_t(world.rank());
    sleep(0.1 * double(r));
    came[r] = seconds_since(start);
    world.barrier();
    left[r] = seconds_since(start);
  });
  double last = *std::max_element(came.begin(), came.end());
  EXPECT_GE(last, 0.2);
  for (double t : left) {
    EXPECT_GE(t, last);
    EXPECT_LT(t, last + 0.5);
  }
}

// This backend lets a rank run ahead: the naive ring passes. Its ledger says that others do not.
TEST(Collectives, C11_NaiveRingPassesHereAndItsLedgerSaysItIsStuck) {
  for (bool grouped : {false, true}) {
    std::vector<std::vector<LedgerEntry>> ledgers(4);
    run_threads(4, Device::CPU, {}, [&](Communicator& world) {
      int right = (world.rank() + 1) % 4, left = (world.rank() + 3) % 4;
      Tensor mine = Tensor::from<int32_t>({world.rank()}, {1}), got = mine.like();
      P2P send{P2P::Send, right, mine}, receive{P2P::Receive, left, got};
      if (grouped) {
        world.exchange({send, receive}).wait();
      } else {
        world.exchange({send}).wait();
        world.exchange({receive}).wait();
      }
      require(got.values<int32_t>()[0] == left, "a wrong message came");
      ledgers[size_t(world.rank())] = world.ledger().entries();
    });
    EXPECT_EQ(strict_order(ledgers).empty(), grouped) << strict_order(ledgers);
  }
}

struct Operation {
  const char* name;
  std::function<void(Communicator&)> run;
};
std::vector<Operation> operations() {
  auto tensor = [](int64_t n) { return Tensor::zeros({n}, DType::F32, Device::CPU); };
  return {
      {"all_reduce", [=](Communicator& c) { c.all_reduce(tensor(12)).wait(); }},
      {"reduce", [=](Communicator& c) { c.reduce(tensor(12), 0).wait(); }},
      {"broadcast", [=](Communicator& c) { c.broadcast(tensor(12), 2).wait(); }},
      {"all_gather", [=](Communicator& c) { c.all_gather(tensor(3), tensor(12)).wait(); }},
      {"reduce_scatter", [=](Communicator& c) { c.reduce_scatter(tensor(12), tensor(3)).wait(); }},
      {"gather", [=](Communicator& c) { c.gather(tensor(3), tensor(12), 0).wait(); }},
      {"scatter", [=](Communicator& c) { c.scatter(tensor(12), tensor(3), 2).wait(); }},
      {"all_to_all",
       [=](Communicator& c) {
         std::vector<int64_t> rows(4, 1);
         c.all_to_all(tensor(4), rows, tensor(4), rows).wait();
       }},
      {"exchange",
       [=](Communicator& c) {
         std::vector<P2P> with_all;
         for (int r = 0; r < 4; ++r) {
           if (r == c.rank()) continue;
           with_all.push_back({P2P::Send, r, tensor(2)});
           with_all.push_back({P2P::Receive, r, tensor(2)});
         }
         c.exchange(with_all).wait();
       }},
      {"barrier", [](Communicator& c) { c.barrier(); }},
      {"split", [](Communicator& c) { c.split(0, 0, "again"); }},
  };
}

TEST(Failures, Pitfall122_RankThatThrowsEndsAllAndIsNamed) {
  for (const Operation& o : operations()) {
    auto start = Clock::now();
    expect_refusal(
        [&] {
          run_threads(4, Device::CPU, {.time_limit = 30}, [&](Communicator& world) {
            o.run(world);
            require(world.rank() != 2, "no more paper");
            o.run(world);
          });
        },
        {"rank 2", "no more paper"});
    EXPECT_LT(seconds_since(start), 5) << o.name;
  }
}

TEST(Failures, Pitfall122_RankThatHangsIsNamedWithTheOperation) {
  for (const Operation& o : operations()) {
    auto start = Clock::now();
    expect_refusal(
        [&] {
          run_threads(4, Device::CPU, {.time_limit = 0.2}, [&](Communicator& world) {
            if (world.rank() == 2) sleep(0.5);
            o.run(world);
          });
        },
        {o.name, "rank 2", "never came", "0.2 s"});
    EXPECT_LT(seconds_since(start), 5) << o.name;
  }
}

TEST(Failures, Pitfall122_RankThatNeverComesBackEndsTheProcess) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  auto hang = [] {
    run_threads(4, Device::CPU, {.time_limit = 0.2}, [&](Communicator& world) {
      while (world.rank() == 2) sleep(0.1);
      world.barrier();
    });
  };
  auto start = Clock::now();
  EXPECT_EXIT(
      hang(), [](int status) { return status != 0; }, "barrier.*rank 2 never came");
  EXPECT_LT(seconds_since(start), 0.2 + 5);
}

// Those who wait in a group without the failed rank end as well.
TEST(Failures, Pitfall122_FailureReachesOtherGroups) {
  expect_refusal(
      [&] {
        run_threads(4, Device::CPU, {.time_limit = 30}, [&](Communicator& world) {
          auto group = world.split(world.rank() / 2, world.rank(), "pair");
          require(world.rank() != 3, "out of ideas");
          if (world.rank() == 1) world.barrier();  // so that rank 0 waits for rank 1
          group->barrier();
        });
      },
      {"rank 3", "out of ideas"});
}

// Without check_calls: no rank reads what another did not mean.
TEST(Failures, MismatchedCallsAreFoundWhenRanksMeet) {
  auto run = [](std::function<void(Communicator&, bool)> body) {
    return [body] {
      run_threads(3, Device::CPU, {.time_limit = 5},
                  [&](Communicator& world) { body(world, world.rank() == 1); });
    };
  };
  auto zeros = [](int64_t n, DType t = DType::F32) { return Tensor::zeros({n}, t, Device::CPU); };
  expect_refusal(
      run([&](Communicator& c, bool odd) { c.all_reduce(zeros(odd ? 100'000 : 100'001)).wait(); }),
      {"all_reduce of 100001 F32", "rank 1", "100000"});
  expect_refusal(run([&](Communicator& c, bool odd) {
                   c.all_reduce(zeros(100, odd ? DType::F32 : DType::BF16)).wait();
                 }),
                 {"BF16", "rank 1", "F32"});
  expect_refusal(run([&](Communicator& c, bool odd) {
                   Tensor t = zeros(8);
                   (odd ? c.broadcast(t, 0) : c.all_reduce(t)).wait();
                 }),
                 {"all_reduce", "rank 1 calls broadcast"});
  expect_refusal(run([&](Communicator& c, bool odd) {
                   if (odd) return c.barrier();
                   c.split(0, 0, "some");
                 }),
                 {"split", "barrier"});
  expect_refusal(run([&](Communicator& c, bool odd) {
                   Tensor t = zeros(odd ? 5 : 4);
                   if (odd) c.exchange({{P2P::Send, 0, t}}).wait();
                   if (c.rank() == 0) c.exchange({{P2P::Receive, 1, t}}).wait();
                 }),
                 {"message 0 of rank 1", "has 5 F32", "expects 4"});
  expect_refusal(run([&](Communicator& c, bool odd) {
                   std::vector<int64_t> ones(3, 1), sends = ones;
                   if (odd) sends = {2, 1, 1};
                   c.all_to_all(zeros(odd ? 4 : 3), sends, zeros(3), ones).wait();
                 }),
                 {"rank 1 sends 2 rows to rank 0", "expects 1"});
}

TEST(Failures, DroppedWorkEndsTheProgram) {
  GTEST_FLAG_SET(death_test_style, "threadsafe");
  auto drop = [](bool by_assignment) {
    run_threads(2, Device::CPU, {}, [&](Communicator& world) {
      Tensor t = Tensor::zeros({4}, DType::F32, Device::CPU);
      Work work = world.all_reduce(t);
      if (by_assignment) work = Work();
    });
  };
  EXPECT_DEATH(drop(false), "launched and never waited for");
  EXPECT_DEATH(drop(true), "launched and never waited for");
}

TEST(Failures, WorkMayBeDroppedWhileAnExceptionIsOnItsWay) {
  expect_refusal(
      [] {
        run_threads(2, Device::CPU, {}, [&](Communicator& world) {
          Tensor t = Tensor::zeros({4}, DType::F32, Device::CPU);
          Work work = world.all_reduce(t);
          fail("something else went wrong");
        });
      },
      {"something else went wrong"});
}

TEST(Failures, WorkIsDoneOnceItWasWaitedFor) {
  run_threads(2, Device::CPU, {}, [&](Communicator& world) {
    Tensor t = Tensor::zeros({4}, DType::F32, Device::CPU);
    Work work = world.all_reduce(t), other;
    require(work.pending(), "not launched");
    other = std::move(work);
    require(!work.pending() && other.pending(), "not moved");
    other.wait();
    other.wait();  // nothing more to wait for
    require(!other.pending(), "still pending");
  });
}

// Copies that were posted go back: what is held after many operations is what was held before.
TEST(Memory, OperationsLeaveNothingBehind) {
  std::atomic<int64_t> left = 0;
  run_threads(4, Device::CPU, {}, [&](Communicator& world) {
    auto group = world.split(world.rank() % 2, 0, "half");
    Tensor t = Tensor::zeros({1000}, DType::F32, Device::CPU, Category::Buffers);
    world.barrier();
    int64_t before = memory_account()->now();
    for (int k = 0; k < 50; ++k) {
      world.all_reduce(t).wait();
      group->all_reduce(t).wait();
      for (const Operation& o : operations()) o.run(world);
    }
    world.barrier();
    left += memory_account()->now() - before;
  });
  EXPECT_EQ(left, 0);
}

}  // namespace
}  // namespace lockstep
