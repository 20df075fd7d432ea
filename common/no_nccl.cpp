// What stands in for NCCL in a build without it: GPUs of several processes cannot talk.

#include "common/comm_nccl.h"

namespace lockstep {

std::unique_ptr<Communicator> make_nccl_world(int, int size,
                                              const std::function<void(void*, size_t)>&,
                                              std::shared_ptr<Ledger>, Communicator::Options) {
  fail(text("this program was built without NCCL, over which GPUs of several processes talk: run ",
            size, " ranks as threads of one process (--ranks ", size,
            " without mpirun) or on the CPU (--device cpu), or build again with "
            "cmake -DLOCKSTEP_NCCL_ROOT=... naming the folder above NCCL's include/ and lib/"));
}

}  // namespace lockstep
