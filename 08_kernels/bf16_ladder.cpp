#include "08_kernels/bf16_ladder.h"

#include "08_kernels/tiles.h"

namespace lockstep::ladder {

MatmulRung best_matmul() {
  MatmulRung fast = hopper_cluster(), everywhere = mma_sync();
  return {fast.name, fast.idea, everywhere.takes,
          [fast, everywhere](const Matmul& p, cudaStream_t stream) {
            (fast.takes(p) ? fast : everywhere).launch(p, stream);
          }};
}

// A tile's stores are not hidden, so the sums have to be long; and each pair of multiprocessors
// does whole tiles of 256 x 256, so the last round of them has to be nearly full. A result that is
// much larger than the L2 cache keeps the memory as busy as the tensor cores, which the library
// balances better.
bool worth_it(const Matmul& p) {
  static const MatmulRung fast = hopper_cluster();
  if (!fast.takes(p)) return false;
  int64_t pairs = multiprocessors() / 2, count = tiles(p.m, 256) * tiles(p.n, 256);
  double full = double(count) / double(tiles(count, pairs) * pairs);
  return p.k >= 8192 && full >= 0.95 && p.m * p.n <= int64_t(1) << 26;
}

std::vector<MatmulRung> bf16_ladder() {
  return {wmma_rung(),         mma_sync(),       hopper_wgmma(),   hopper_pipeline(),
          hopper_persistent(), hopper_cluster(), hopper_pingpong()};
}

}  // namespace lockstep::ladder
