#pragma once
// The memory-bound operations of a training step as a framework without fused kernels runs them:
// one kernel for each operation on a tensor, so that every intermediate result travels to memory
// and back. Their arguments are those of the fused kernels in common/kernels.h, which a training
// step runs; memory_bound.cpp times both beside a copy.
//
//     plain    x ─▶ [add] ─▶ sum ─▶ [mean of squares] ─▶ rstd ─▶ [x rstd] ─▶ n ─▶ [n gain] ─▶ y
//     fused    x ─▶ [                          RMSNorm                                   ] ─▶ y
//
// The time of each is that of its bytes. Count them: the arrows of the picture.

#include "common/kernels.h"

namespace lockstep::plain {

void rmsnorm(const Tensor& y, const Tensor& rstd, const Tensor& x, const Tensor& delta,
             const Tensor& sum, const Tensor& gain, float eps);
void rmsnorm_backward(const Tensor& dx, const Tensor& dy, const Tensor& d_sum, const Tensor& x,
                      const Tensor& rstd, const Tensor& gain);
void swiglu(const Tensor& out, const Tensor& gate_up);
void rope(const Tensor& out, const Tensor& qkv, const Tensor& positions, const Tensor& inv_freq,
          const AttentionShape& shape);
void cross_entropy(const Tensor& loss, const Tensor& lse, const Tensor& logits,
                   const Tensor& targets, const Tensor& scale);
void adamw(const Tensor& value, const Tensor& master, const Tensor& m, const Tensor& v,
           const Tensor& grad, const Tensor& state, const UpdateRule& rule, bool decay);
void sum_squares(const Tensor& sum, const Tensor& x);

}  // namespace lockstep::plain
