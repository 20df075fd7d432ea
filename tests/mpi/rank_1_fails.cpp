// What a test looks like that is right everywhere but on rank 1: failure_test.cpp runs it.

#include <gtest/gtest.h>

#include "tests/mpi/main.h"

namespace lockstep {

TEST(Rank1, FailsAlone) {
  auto world = fresh_world();
  world->barrier();
  EXPECT_NE(world->rank(), 1);
}

TEST(Rank1, LeavesTheOthersWaiting) {
  auto world = fresh_world({.time_limit = 2});
  ASSERT_NE(world->rank(), 1);
  world->barrier();
}

}  // namespace lockstep
