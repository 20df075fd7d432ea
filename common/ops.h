#pragma once
// The differentiable operations of the model. Each computes its result, and records how to undo it:
// forward and adjoint stand side by side in ops.cpp. Shapes: [T, H] are T tokens (rows), H wide.

#include "common/autograd.h"

namespace lockstep {

// The tokens of one micro-batch as the model wants them, on the device that computes.
struct MicroBatch {
  Tensor inputs, targets;  // [T] I32; a target < 0 is ignored
  Tensor positions;        // [T] I32: place in the sequence, for RoPE
  Tensor rows;             // [T] I64: place in the run's global order of tokens, for dropout
  int64_t sequences = 0, length = 0;
  bool training = true;  // false: no dropout
};

// Weights [N_i, K] that lie one behind the other and are multiplied as one: q|k|v, gate|up.
using Weights = std::vector<Parameter*>;

// Matrices [N_i, K] that are multiplied as one, and their biases [N_i], if any.
struct Projection {
  Weights weights, biases = {};
  Weights all() const {
    Weights both = weights;
    both.insert(both.end(), biases.begin(), biases.end());
    return both;
  }
  int64_t inputs() const { return weights[0]->shard.local[1]; }
  int64_t outputs() const {
    int64_t sum = 0;
    for (Parameter* p : weights) sum += p->shard.local[0];
    return sum;
  }
};

// y [T, sum of N_i] = x [T, K] weights^T (+ biases). The weight gradient is accumulated by the
// matmul itself (beta = 1).
Var linear(Tape&, const Var& x, const Projection&);
// Its three matmuls, for those who do something else between them (04).
void multiply(const Tensor& y, const Tensor& x, const Projection&);
void input_gradient(const Tensor& dx, const Tensor& dy, const Projection&);
void add_weight_gradient(const Projection&, const Tensor& dy, const Tensor& x);

// y + bias, where a linear's own biases come too early: after partial sums (04).
Var add_bias(Tape&, const Var& y, const Weights& biases);

// [T, H]: rows of table [V, H]; ids outside of the rank's rows [first, first + V) give zeros.
Var embedding(Tape&, Parameter& table, const Tensor& ids, int64_t first = 0);

Var rmsnorm(Tape&, const Var& x, Parameter& gain, double epsilon);
struct Normed {
  Var sum, normed;
};
// sum = x + delta and its norm, in one pass over memory.
Normed add_rmsnorm(Tape&, const Var& x, const Var& delta, Parameter& gain, double epsilon);
Var add(Tape&, const Var& a, const Var& b);

// Rotary positions on the q and k part of qkv. inv_freq: see rope_frequencies.
Var rope(Tape&, const Var& qkv, const Tensor& positions, const Tensor& inv_freq,
         const AttentionShape&);
Tensor rope_frequencies(int64_t head_dim, double theta, DType compute, Device device);

// Causal attention that writes the whole matrix of probabilities to memory: the reference.
Var plain_attention(Tape&, const Var& qkv, const AttentionShape&);

Var swiglu(Tape&, const Var& gate_up);  // [T, 2F] -> [T, F]
Var dropout(Tape&, const Var& x, const Tensor& rows, double p, RandomStream, int64_t width,
            int64_t first = 0);

// [1]: the sum over valid targets of the negative log-likelihood, times scale [1].
Var cross_entropy(Tape&, const Var& logits, const Tensor& targets, const Tensor& scale);

}  // namespace lockstep
