#pragma once
// The rungs of the bf16 matmul. Each is a file of the same name.

#include "08_kernels/rung.h"

namespace lockstep::ladder {

MatmulRung wmma_rung();               // wmma.cu            any GPU since A100 (these two)
MatmulRung mma_sync(int stages = 3);  // mma_sync.cu        two where a block has no room for three
MatmulRung hopper_wgmma();            // hopper_wgmma.cu    Hopper
MatmulRung hopper_pipeline();         // hopper_pipeline.cu
MatmulRung hopper_persistent();       // hopper_persistent.cu
MatmulRung hopper_cluster();          // hopper_cluster.cu
MatmulRung hopper_held();             // hopper_held.cu
MatmulRung hopper_stream_k();         // hopper_stream_k.cu

// The ladder as it is used: the last rung where it fits, mma.sync elsewhere.
MatmulRung best_matmul();
// Is that at least as fast as the library, as far as measurements go (README.md)?
bool worth_it(const Matmul& p);

}  // namespace lockstep::ladder
