#pragma once
// What the model runs: the last rung of the bf16 ladder, where it is at least as fast as the
// library.

#include "common/kernels.h"
#include "common/options.h"

namespace lockstep {

// Puts it into the matmul slot of this table. Whatever it does not take, or takes longer for, goes
// on to the kernel that was in the slot before. Changes nothing where the GPU is no Hopper, or
// where there is none. Like all changes of a table, it belongs before the ranks start.
void use_own_matmul(Kernels& table);

// As --matmul says; a program calls it when it has read its flags.
inline void use_own_matmul(const Options& o) {
  if (o.device == Device::CUDA && o.ladder_matmul) use_own_matmul(kernels(o.device));
}

}  // namespace lockstep
