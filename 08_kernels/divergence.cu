// The 32 threads of a warp share one instruction. Where they disagree about an `if`, the warp runs
// both sides, one after the other, and on each the threads of the other side stand still:
//
//     threads disagree    ▓░▓░▓░▓░  then  ░▓░▓░▓░▓     two ways: twice the time
//     warps disagree      ▓▓▓▓▓▓▓▓   and  ▓▓▓▓▓▓▓▓     each warp goes one way: no loss
//
// So let a condition depend on the warp (or the block) where there is a choice.

#include "08_kernels/basics.h"
#include "08_kernels/each.h"

namespace lockstep::basics {

void go_ways(const Tensor& out, int ways, bool warps_agree) {
  float* at = out.data<float>();
  each(out.size(), [=] __device__(int64_t i) {
    int way = int((warps_agree ? i / 32 : i) % ways);
    float value = float(i % 7);
    for (int w = 0; w < ways; ++w)
      if (way == w)
        for (int step = 0; step < 256; ++step) value = value * 0.5f + float(w);
    at[i] = value;
  });
}

}  // namespace lockstep::basics
