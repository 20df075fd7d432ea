#pragma once
// Where ranks come from. Every program starts in three ways with the same flags:
//
//   program --ranks 4                         four threads of this process (CPU, or one GPU)
//   mpirun -n 4 program                       four processes, talking over MPI
//   mpirun -n 4 program --device cuda         four processes with a GPU each, talking over NCCL
//
// A rank that fails ends all of them: its error is printed with its number and its last operation,
// waits of the others break off, and the exit status is not zero. Nobody leaves alone: the end of a
// rank is a wait for the others, too, with the same time limit.
//
//     ranks   4 processes over MPI, 2 cores each         what run_ranks says first, on stderr

#include <functional>

#include "common/comm.h"

namespace lockstep {

struct Launch {
  int ranks = 1;  // as threads; processes are counted by MPI
  Device device = Device::CPU;
  Communicator::Options options;
};

// Runs body once for every rank that lives in this process and returns the exit status. `world` is
// named "world" and lives as long as body runs.
int run_ranks(const Launch& launch, const std::function<void(Communicator& world)>& body);

// Ranks as threads only; throws the error of the first rank that failed, with "rank 2: " before it.
void run_threads(int ranks, Device device, Communicator::Options options,
                 const std::function<void(Communicator& world)>& body);

}  // namespace lockstep
