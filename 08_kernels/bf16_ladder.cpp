// The rungs of the bf16 matmul, slowest first.

#include "08_kernels/rung.h"

namespace lockstep::ladder {

std::vector<MatmulRung> bf16_ladder() { return {}; }

}  // namespace lockstep::ladder
