#pragma once
// All arithmetic on tensors: one line per kernel, the same table for the CPU and for CUDA.
//
//   on(x).rmsnorm(y, rstd, x, delta, sum, gain, eps);       // runs where x lives
//
// Conventions. Outputs come first. Every output element is written; "+=" marks those that are added
// to. [T, H] is a matrix of T rows (tokens) with H columns, row-major. Floating-point tensors are
// BF16, F32 or (CPU only) F64; sums are kept in fp32 (fp64 for F64 inputs) and added in an order
// that depends on sizes alone, so a repeated run gives the same bits. On CUDA all kernels run in
// the rank's stream, never wait for the host, and can be captured into a graph.
//
// The table is mutable so that a program may put a better kernel in a slot before its ranks start.

#include "common/random.h"
#include "common/step_state.h"
#include "common/tensor.h"

namespace lockstep {

enum class Op : uint8_t { N, T };  // a matrix as it is, or transposed

// The q|k|v rows of one micro-batch: [sequences * length, (heads + 2 kv_heads) * head_dim], with
// query heads first, then key heads, then value heads. Query head h reads key head h / (heads /
// kv_heads).
struct AttentionShape {
  int64_t sequences, length, heads, kv_heads, head_dim;
  int64_t columns() const { return (heads + 2 * kv_heads) * head_dim; }
};

// Where element i of a local shard sits in the whole tensor:
// (i / local_stride) * whole_stride + offset + i % local_stride.
struct IndexMap {
  int64_t local_stride = 1, whole_stride = 1, offset = 0;
  LOCKSTEP_BOTH int64_t whole(int64_t i) const {
    return i / local_stride * whole_stride + offset + i % local_stride;
  }
};

struct Kernels {
  // c [M, N] = op(a) op(b) + beta c. a and b have one type; c may be wider (F32 for BF16 inputs).
  void (*matmul)(const Tensor& c, const Tensor& a, Op, const Tensor& b, Op, float beta);

  // out [T, H]: row ids[t] - first of table [V, H]; zeros where that is outside of the table.
  void (*embedding)(const Tensor& out, const Tensor& table, const Tensor& ids, int64_t first);
  void (*embedding_backward)(const Tensor& d_table /* += */, const Tensor& d_out, const Tensor& ids,
                             int64_t first);

  // sum = x + delta, y = sum * rstd * gain, rstd [T] = 1 / sqrt(mean(sum^2) + eps). Without delta
  // (undefined) there is no sum and x itself is normalised. Zhang and Sennrich, NeurIPS 2019,
  // eq. 4.
  void (*rmsnorm)(const Tensor& y, const Tensor& rstd, const Tensor& x, const Tensor& delta,
                  const Tensor& sum, const Tensor& gain, float eps);
  // dx = gradient through the norm (+ d_sum, where defined); x is what was normalised.
  void (*rmsnorm_backward)(const Tensor& dx, const Tensor& dy, const Tensor& d_sum, const Tensor& x,
                           const Tensor& rstd, const Tensor& gain);
  void (*rmsnorm_gain_backward)(const Tensor& d_gain /* += */, const Tensor& dy, const Tensor& x,
                                const Tensor& rstd);

  // Turns the q and k heads of qkv by angle positions[t] * inv_freq[i] in the planes (i, i + d/2),
  // as Hugging Face's Llama does; v is copied. inverse turns back, which is also the gradient. Su
  // et al., "RoFormer" (2021), section 3.4. positions [T] I32, inv_freq [d/2] F32 (F64 for F64).
  void (*rope)(const Tensor& out, const Tensor& qkv, const Tensor& positions,
               const Tensor& inv_freq, const AttentionShape&, bool inverse);

  // Plain causal attention. probs [sequences, heads, length, length] is kept for backward.
  void (*attention)(const Tensor& out, const Tensor& probs, const Tensor& qkv,
                    const AttentionShape&);
  void (*attention_backward)(const Tensor& d_qkv, const Tensor& d_out, const Tensor& probs,
                             const Tensor& qkv, const AttentionShape&);

  // out [T, F] = silu(gate) * up with gate_up [T, 2F]. Shazeer, "GLU variants" (2020), eq. 6.
  void (*swiglu)(const Tensor& out, const Tensor& gate_up);
  void (*swiglu_backward)(const Tensor& d_gate_up, const Tensor& d_out, const Tensor& gate_up);

  void (*add_bias)(const Tensor& y /* += */, const Tensor& bias);
  void (*bias_backward)(const Tensor& d_bias /* += */, const Tensor& dy);

  // out = x / (1 - p) with probability 1 - p, else 0. The decision for row t, column j of a tensor
  // whose whole width is `width` is number rows[t] * width + first + j of the stream. rows [T] I64.
  void (*dropout)(const Tensor& out, const Tensor& x, const Tensor& rows, float p, RandomStream,
                  int64_t width, int64_t first);

  // loss [1] = scale[0] * sum over t of (lse[t] - logits[t, targets[t]]); targets < 0 are ignored.
  // lse [T] = log(sum(exp(logits))). scale [1] is 1 / valid tokens of the whole global batch.
  void (*cross_entropy)(const Tensor& loss, const Tensor& lse, const Tensor& logits,
                        const Tensor& targets, const Tensor& scale);
  // logits are columns first, first + 1, … of the whole vocabulary, lse is over all of it.
  void (*cross_entropy_backward)(const Tensor& d_logits, const Tensor& d_loss, const Tensor& logits,
                                 const Tensor& lse, const Tensor& targets, const Tensor& scale,
                                 int64_t first);
  // The same loss where the vocabulary is cut over several ranks (04). statistics [2, T]: of the
  // columns here, log(sum(exp(logits))), and the target's logit, 0 where it is not among them.
  // vocab_cross_entropy puts those of all ranks [ranks, 2, T] together.
  void (*vocab_statistics)(const Tensor& statistics, const Tensor& logits, const Tensor& targets,
                           int64_t first);
  void (*vocab_cross_entropy)(const Tensor& loss, const Tensor& lse, const Tensor& all,
                              const Tensor& targets, const Tensor& scale);

  void (*add)(const Tensor& out, const Tensor& a, const Tensor& b);
  void (*add_into)(const Tensor& sum /* += */, const Tensor& x);  // types may differ
  void (*cast)(const Tensor& to, const Tensor& from);             // types may differ
  void (*fill)(const Tensor& t, double value);
  void (*fill_normal)(const Tensor& t, float std, RandomStream, IndexMap, int64_t first);

  // sums [n] F64: of each of n tensors the sum of its squares, 0 for an undefined one. All at once,
  // because a model has hundreds of gradients, most of them smaller than what a launch costs.
  void (*sum_squares)(const Tensor& sums, const std::vector<Tensor>& all);
  // state: one StepState as U8. begin_step: a new step with valid [1] I64 targets; its loss is 0 so
  // far, and scale [1] = 1 / valid (0 if there are none).
  void (*begin_step)(const Tensor& state, const Tensor& scale, const Tensor& valid);
  // add_loss: state.loss += loss[0]. local_sums: sums [2] F64 = state.loss and the sum of `squares`
  // [n] F64, what ranks then add up. begin_update: step_state.h, with the loss and the squared norm
  // in sums.
  void (*add_loss)(const Tensor& state, const Tensor& loss);
  void (*local_sums)(const Tensor& sums, const Tensor& state, const Tensor& squares);
  void (*begin_update)(const Tensor& state, const Tensor& sums, const UpdateRule&);
  // AdamW on n elements. value is the compute-type copy of master (or the same memory).
  void (*adamw)(const Tensor& value, const Tensor& master, const Tensor& m, const Tensor& v,
                const Tensor& grad, const Tensor& state, const UpdateRule&, bool decay);

  // One sequence that goes on: its `past` rows are remembered as keys and values [longest, kv_heads
  // * head_dim], and shape.length new ones come, as qkv. First their k and v are written to rows
  // past, past + 1, ... of keys and values; then new row i attends to rows 0 to past + i. Serves
  // generation: there is no backward.
  void (*attention_cached)(const Tensor& out, const Tensor& keys, const Tensor& values,
                           const Tensor& qkv, const AttentionShape&, int64_t past);
};

Kernels& kernels(Device device);  // throws where there is no such device
inline Kernels& on(const Tensor& t) { return kernels(t.device()); }

// Filled in by the files that hold the kernels, one function per family and device.
namespace cpu {
void add_matmul(Kernels&);
void add_layers(Kernels&);
void add_attention(Kernels&);
void add_loss(Kernels&);
void add_elementwise(Kernels&);
void add_optimizer(Kernels&);
}  // namespace cpu
namespace cuda {  // kernels_cuda_*.cu; a build without CUDA links no_cuda.cpp instead
void add_all(Kernels&);
}  // namespace cuda

}  // namespace lockstep
