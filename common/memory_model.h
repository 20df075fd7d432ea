#pragma once
// How many bytes a training step takes, before it runs. Two views: the source's formulas for a
// GPT-style model in 16 bits, and the exact count for the model that is built here.
//
// The exact count of activations follows from what each adjoint captures (ops.cpp). Per token of
// one block, in elements (H hidden, Q and KV the widths of q and of k, F ffn, A heads, S sequence):
//
//   norm  keeps x                 H     attention  keeps q|k|v   Q + 2 KV     norm     keeps x + a
//   H q|k|v keeps the normed x      H                and probs     A S          gate|up  keeps its
//   input H
//                                       o          keeps its input Q          swiglu   keeps
//                                       gate|up  2F
//   and each norm one fp32 number                                             down     keeps its
//   input F

#include <vector>

#include "common/dtype.h"
#include "common/flops.h"
#include "common/model_config.h"
#include "common/parameter.h"

namespace lockstep {

// Weights, gradients, masters and moments: 4N + 4N + 8N in fp32; 2N + (2 or 4)N + 4N + 8N in bf16.
struct ModelMemory {
  int64_t weights, gradients, master, moments;
  int64_t total() const { return weights + gradients + master + moments; }
};
ModelMemory model_memory(int64_t parameters, DType compute, DType gradients);

// The same for one rank of `data`, with ZeRO's stage 0 to 3 (parallel_formulas.h). Exact for the
// flat buckets of those sizes: weights and gradients have padding to equal shards, masters and
// moments have none, so that the last ranks may hold less of these. What is whole for a moment
// (gradients of stage 2, weights of stage 3) counts as buffers and comes on top.
ModelMemory zero_memory(const std::vector<int64_t>& buckets, DType compute, DType gradients,
                        int stage, Cut data);
// As one bucket, on the first rank.
inline ModelMemory zero_memory(int64_t parameters, DType compute, DType gradients, int stage,
                               int data_ranks) {
  return zero_memory({parameters}, compute, gradients, stage, {0, data_ranks});
}

struct BatchShape {
  int64_t sequences, length;
  int64_t tokens() const { return sequences * length; }
};

struct ActivationMemory {
  int64_t block;   // what one block keeps until its backward
  int64_t head;    // what the final norm, the head and the loss keep
  int64_t stored;  // all that is kept when forward ends
  int64_t peak;    // the most during the step: `stored` and what is under way at the worst moment
};
ActivationMemory activation_memory(const ModelConfig&, BatchShape, DType compute, Recompute);

// L s b h (34 + 5 a s / h) bytes, for 16-bit activations and one-byte dropout masks: Korthikanti et
// al. (2022), equation 2; the Playbook's "memory for activations". Selective recomputation leaves
// 34, full recomputation the 2 of a block's input.
double source_activation_bytes(double layers, double length, double sequences, double hidden,
                               double heads, Recompute);

// Share of those activations that selective recomputation saves: 5as/h of 34 + 5as/h. GPT-3 175B (a
// = 96, s = 2048, h = 12288): 80 of 114 = 70 %.
double selective_saving(double heads, double length, double hidden);

// What it costs. Forward and backward of a block take 72 h^2 + 12 s h operations per token: 24 h^2
// for the matrices and 4 s h for attention's two products, three times (Korthikanti et al.,
// appendix A).
//   attention_share    12 s h of all, (s/6h) / (1 + s/6h): GPT-3 2.7 %, the figure that is quoted
//   one_more_forward    4 s h on top, (s/18h) / (1 + s/6h): GPT-3 0.9 %, what running it again
//   takes
double attention_share(double length, double hidden);
double one_more_forward(double length, double hidden);

}  // namespace lockstep
