#include "08_kernels/bf16_ladder.h"

#include "08_kernels/tiles.h"

namespace lockstep::ladder {

MatmulRung best_matmul() {
  MatmulRung fast = hopper_stream_k(), everywhere = mma_sync();
  return {fast.name, fast.idea, everywhere.takes,
          [fast, everywhere](const Matmul& p, cudaStream_t stream) {
            (fast.takes(p) ? fast : everywhere).launch(p, stream);
          }};
}

// Sums have to be long, since between two tiles there is a little time in which the tensor cores
// have nothing to do; and each pair of multiprocessors does tiles of 256 x 256, so there has to be
// at least one for each, and the last round of them nearly full.
bool worth_it(const Matmul& p) {
  static const MatmulRung fast = hopper_stream_k();
  if (!fast.takes(p)) return false;
  int64_t pairs = multiprocessors() / 2, count = tiles(p.m, 256) * tiles(p.n, 256);
  double full = double(count) / double(tiles(count, pairs) * pairs);
  return p.k >= 4096 && count >= pairs && full >= 0.95;
}

std::vector<MatmulRung> bf16_ladder() {
  return {wmma_rung(),         mma_sync(),       hopper_wgmma(), hopper_pipeline(),
          hopper_persistent(), hopper_cluster(), hopper_held(),  hopper_stream_k()};
}

}  // namespace lockstep::ladder
