#pragma once
// For test programs that run under mpirun (lockstep_mpi_test in tests/CMakeLists.txt): all ranks
// run the same tests in the same order, and a test has passed if it has on all of them.

#include "common/comm_mpi.h"

namespace lockstep {

MpiJob& this_job();

// A communicator of all ranks for one test: what a failed test left behind is not in it. Every rank
// calls it.
std::unique_ptr<Communicator> fresh_world(Communicator::Options options = {.time_limit = 20},
                                          int64_t piece = 1 << 30);

}  // namespace lockstep
