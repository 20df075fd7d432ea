#pragma once
// Ranks as processes with a GPU each, talking over NCCL, NVIDIA's collectives.
//
// NCCL works on CUDA streams: a call only enqueues a kernel, which moves the data once the same
// call of all other ranks has been enqueued too. Each communicator has a stream of its own, so that
// messages travel while the rank computes:
//
//   the rank's stream   … makes the input ─▶ ready …  computes on  … wait() ─▶ uses the result
//   communicator's         waits for ready ─▶ NCCL's kernel ─▶ done ─────────┘
//
// wait() makes the rank's stream wait for done; the host never waits. A hang would thus show only
// where the host happens to synchronise, so a thread watches (comm_nccl_watch.h): it ends the
// process with a sentence when NCCL reports an error, or when an operation whose input is there is
// not done within the time limit.
//
// Large buffers of GPUs that reach each other's memory do not need kernels: copy engines move them
// in the same stream (comm_copies.h).
//
// Two things differ from the other backends. Sums of NCCL's kernels do not add in rank order, and
// round bf16 and fp16 at every hop. And groups share the GPU, so all ranks must launch all their
// operations in one order, over all groups: Ledger's strict_order() tells whether they do.
//
// How a program gets there: gpu_ranks.h.

#include <functional>
#include <memory>

#include "common/comm.h"

namespace lockstep {

// All ranks call it, each with its GPU chosen (device::use). The function that the caller supplies
// gives everyone rank 0's bytes: that is how NCCL's id travels, and all that is needed to start.
std::unique_ptr<Communicator> make_nccl_world(
    int rank, int size, const std::function<void(void*, size_t)>& broadcast_from_rank_0,
    std::shared_ptr<Ledger> ledger, Communicator::Options options);

}  // namespace lockstep
