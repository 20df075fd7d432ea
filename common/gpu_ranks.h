#pragma once
// How processes become ranks with a GPU each. They can already talk on the CPU (`processes`, over
// MPI); what is missing is who takes which GPU, and NCCL's id:
//
//   auto job = join_mpi_job();
//   auto processes = job->world(options);
//   auto world = start_gpu_ranks(*processes, job->host().first, std::getenv("NCCL_HOSTID"), ledger,
//                                options);
//
// in this order, before anything else touches a GPU.

#include "common/comm.h"

namespace lockstep {

// Collective; if it cannot be, all ranks throw the same sentence. `host` is a number that the
// processes of one machine share. The environment variable NCCL_HOSTID (null: not set) makes NCCL
// believe that ranks with different ids are on different machines: each set of ranks with the same
// id then takes the GPUs from 0 on, so that tests can have more ranks than GPUs.
std::unique_ptr<Communicator> start_gpu_ranks(Communicator& processes, int host, const char* hostid,
                                              std::shared_ptr<Ledger> ledger,
                                              Communicator::Options options);

// NCCL refuses two ranks of one host on one GPU ("Duplicate GPU detected"), after a while and in
// its own words. One sentence that says what to do instead, or nothing if all is well. `ranks`:
// those of this host with the same NCCL_HOSTID.
std::string too_many_ranks(int ranks, int gpus, const char* hostid);

}  // namespace lockstep
