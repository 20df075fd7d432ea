#pragma once
// Sizes and costs from formulas, as The Ultra-Scale Playbook gives them (Hugging Face 2025: "Memory
// usage in transformers", appendices A2 and A3), so that a program can print them beside what it
// measured. Counts are elements unless the name says bytes.

#include <cstdint>

#include "common/ledger.h"

namespace lockstep {

// A GPT-style model: biases, two-gain LayerNorms, a feed-forward block of 4h, the head tied to the
// embedding: N = hV + L (12 h^2 + 13 h) + 2h. Learned positions would add max_sequence * h. The
// Llama-style count is ModelConfig::parameters().
inline int64_t gpt_parameters(int64_t h, int64_t vocab, int64_t layers) {
  return h * vocab + layers * (12 * h * h + 13 * h) + 2 * h;
}

// Matrices of one block: attention takes 4h^2; a feed-forward block of width 4h takes 8h^2 with two
// matrices, 12h^2 with the three of a gated unit.
inline int64_t block_parameters(int64_t h, bool gated) {
  return 4 * h * h + (gated ? 12 : 8) * h * h;
}

// Bytes for weights, gradients, fp32 master weights and AdamW's two moments.
enum class Precision {
  Fp32,             // 4 + 4 + 0 + 8 = 16 per parameter
  Bf16,             // 2 + 2 + 4 + 8 = 16
  Bf16PlusFp32Grad  // 2 + 2 + 4 + 8 and another 4: a fp32 copy of the gradients beside the bf16 one
};
inline int64_t training_bytes(int64_t parameters, Precision p) {
  return parameters * (p == Precision::Bf16PlusFp32Grad ? 20 : 16);
}

// Tokens in a batch of `sequences`, and what follows from a batch size counted in tokens.
inline int64_t batch_tokens(int64_t sequences, int64_t length) { return sequences * length; }

// What travels between operations and between devices (A2).
struct TypicalSizes {
  int64_t tokens, hidden_state, weight, gradient, optimizer, master;
};
inline TypicalSizes typical_sizes(int64_t length, int64_t micro_batch, int64_t h) {
  int64_t tokens = length * micro_batch, weight = h * h;
  return {tokens, tokens * h, weight, weight, 2 * weight, weight};
}

// Multiplications and additions of a pass: every weight multiplies every token once forward (2
// operations), twice backward (for the input's and for the weight's gradient).
inline double forward_flops(double tokens, double parameters) { return 2 * tokens * parameters; }
inline double backward_flops(double tokens, double parameters) { return 4 * tokens * parameters; }
// Of one sequence, forward and backward, with attention's own products: 6 s N + 12 L h s^2.
inline double sequence_flops(double length, double parameters, double layers, double h) {
  return 6 * length * parameters + 12 * layers * h * length * length;
}

// Algorithm bandwidth is what the caller sees: payload / seconds (of the whole, for operations on
// shards). Bus bandwidth is what the busiest link carries, to compare with the hardware's, whatever
// the number of ranks: nccl-tests, doc/PERFORMANCE.md, "Bus bandwidth". gather and scatter are not
// in that page; the root's link carries all parts but its own.
inline double bus_factor(Collective operation, int n) {
  double others = double(n - 1) / n;
  switch (operation) {
    case Collective::AllReduce: return 2 * others;
    case Collective::AllGather:
    case Collective::ReduceScatter:
    case Collective::AllToAll:
    case Collective::Gather:
    case Collective::Scatter: return others;
    case Collective::Broadcast:
    case Collective::Reduce:
    case Collective::Exchange: return 1;
    case Collective::Barrier: return 0;
  }
  return 0;
}
inline double algorithm_bandwidth(double payload_bytes, double seconds) {
  return payload_bytes / seconds;
}
inline double bus_bandwidth(Collective operation, int n, double payload_bytes, double seconds) {
  return algorithm_bandwidth(payload_bytes, seconds) * bus_factor(operation, n);
}

// Why anyone trains on many GPUs. The Playbook's picture of GPT-4: 25,000 GPUs for 90 days. If
// scaling is perfect that is 25,000 * 90 / 365 = 6,164 years on one of them.
inline double gpu_years(double gpus, double days) { return gpus * days / 365; }
inline double days_on(double gpus, double years_on_one) { return years_on_one * 365 / gpus; }

}  // namespace lockstep
