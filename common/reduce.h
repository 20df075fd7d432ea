#pragma once
// The sum that all our backends share: element by element over ranks, in the order of ranks, so
// that its bits depend on nothing but the values: not on how messages were cut, not on who came
// first. 16-bit types are added in fp32 and rounded once.

#include <span>

#include "common/comm.h"

namespace lockstep {

// to[i] = op over r of parts[r][i], for `count` elements of type t on the CPU. to may be one of the
// parts.
void reduce_in_rank_order(std::byte* to, std::span<const std::byte* const> parts, int64_t count,
                          DType t, ReduceOp op);

// The same on the device where the tensors are.
void reduce_in_rank_order(const Tensor& to, const std::vector<Tensor>& parts, ReduceOp op);

namespace cuda {  // the same on a GPU, in the rank's stream: comm_threads_cuda.cu
void reduce_in_rank_order(const Tensor& to, std::span<const std::byte* const> parts, ReduceOp op);
}  // namespace cuda

}  // namespace lockstep
