#pragma once
// The small kernels of basics.cpp, each in the file of its name. All tensors are F32 on the GPU.

#include "common/tensor.h"

namespace lockstep::basics {

// vector_add.cu
void vector_add(const Tensor& c, const Tensor& a, const Tensor& b);

// elu.cu: x where x > 0, else exp(x) - 1. Clevert et al., "ELU" (ICLR 2016).
void elu_separate(const Tensor& y, const Tensor& x);  // a kernel for each operation
void elu_fused(const Tensor& y, const Tensor& x);

// divergence.cu: thread i takes way number i % ways, or warp i goes way i % ways as a whole.
void go_ways(const Tensor& out, int ways, bool warps_agree);

// layer_norm.cu: y = (x - mean) / sqrt(variance + eps) * gain + bias, row by row. Ba et al., "Layer
// normalization" (2016).
void layer_norm_separate(const Tensor& y, const Tensor& x, const Tensor& gain, const Tensor& bias);
void layer_norm_fused(const Tensor& y, const Tensor& x, const Tensor& gain, const Tensor& bias);
inline constexpr float kLayerNormEpsilon = 1e-5f;

}  // namespace lockstep::basics
