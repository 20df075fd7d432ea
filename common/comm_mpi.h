#pragma once
// Ranks as processes that mpirun started. Only comm_mpi.cpp and mpi_* know MPI; a build
// without it links no_mpi.cpp, in which there is no job to join, and every program runs as the only
// rank of its world (or with ranks as threads).

#include <memory>

#include "common/comm.h"

namespace lockstep {

// MPI in this process, from MPI_Init to MPI_Finalize.
class MpiJob {
 public:
  virtual ~MpiJob() = default;  // all operations are over and waited for
  virtual int rank() const = 0;
  virtual int size() const = 0;

  // What this process shares with others of the job.
  struct Host {
    int first = 0;         // the lowest rank here: the host's number
    int ranks = 1;         // of the job on this host
    int cores = 1;         // for each of them, if it takes its share
    bool crowded = false;  // ranks are more than cores
  };
  virtual const Host& host() const = 0;

  // All ranks, on the CPU; collective. MPI counts with an int, so that messages of more than
  // `piece` bytes travel in pieces (tests make them small).
  virtual std::unique_ptr<Communicator> world(Communicator::Options options,
                                              int64_t piece = int64_t(1) << 30) = 0;

  // Ends all processes of the job; this one too, so that it never returns.
  virtual void end_all() = 0;
};

std::unique_ptr<MpiJob> join_mpi_job();  // nullptr in a build without MPI

}  // namespace lockstep
