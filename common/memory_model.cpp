#include "common/memory_model.h"

#include <algorithm>

namespace lockstep {

ModelMemory model_memory(int64_t n, DType compute, DType gradients) {
  DType master = sum_type(compute);
  int64_t each = int64_t(size_of(master));
  return {n * int64_t(size_of(compute)), n * int64_t(size_of(gradients)),
          master == compute ? 0 : n * each, 2 * n * each};
}

ModelMemory zero_memory(const std::vector<int64_t>& buckets, DType compute, DType gradients,
                        int stage, Cut data) {
  require(stage >= 0 && stage <= 3, "ZeRO has the stages 0 to 3, not ", stage);
  int64_t weights = 0, summed = 0, updated = 0;  // elements of this rank
  for (int64_t n : buckets) {
    int64_t shard = (n + data.size - 1) / data.size, padded = shard * data.size;
    weights += stage == 0 ? n : stage < 3 ? padded : shard;
    summed += stage == 0 ? n : stage < 2 ? padded : shard;
    updated += stage == 0 ? n : std::clamp<int64_t>(n - data.rank * shard, 0, shard);
  }
  ModelMemory m = model_memory(updated, compute, gradients);
  m.weights = weights * int64_t(size_of(compute));
  m.gradients = summed * int64_t(size_of(gradients));
  return m;
}

ActivationMemory activation_memory(const ModelConfig& c, BatchShape batch, DType compute,
                                   Recompute recompute) {
  int64_t tokens = batch.tokens(), h = c.hidden, q = c.q_size(), kv = c.kv_size(), f = c.ffn;
  int64_t element = int64_t(size_of(compute)), number = int64_t(size_of(sum_type(compute)));
  auto bytes = [&](int64_t elements_per_token) { return tokens * elements_per_token * element; };
  int64_t per_row = tokens * number;  // one fp32 number per token: rstd, lse

  int64_t probs = bytes(c.heads * batch.length);
  int64_t whole = bytes(4 * h + 2 * q + 2 * kv + 3 * f) + probs + 2 * per_row;
  ActivationMemory m{};
  m.block = recompute == Recompute::Full        ? bytes(h)
            : recompute == Recompute::Selective ? whole - probs
                                                : whole;
  m.head =
      bytes(2 * h + c.vocab) + 2 * per_row + number;  // x, normed x, logits; rstd, lse; the loss
  m.stored = c.layers * m.block + m.head;

  // The worst moment is one of these. `through` is the gradient that comes down the stream.
  int64_t blocks = c.layers * m.block, through = bytes(h);
  int64_t at_the_loss = m.stored + bytes(c.vocab);      // d logits
  int64_t at_swiglu = blocks + through + bytes(2 * f);  // d gate|up, without down's input
  int64_t worst = std::max(at_the_loss, at_swiglu);
  if (recompute == Recompute::Full) {
    // The last block, whole again: its output takes the place of its input, which counts already.
    // It keeps what its weight gradients need until all its input gradients are there.
    worst = std::max(worst, blocks + whole + through + bytes(std::max(3 * f, 2 * (h + q + kv))));
  }
  if (recompute == Recompute::Selective) {
    int64_t gone = bytes(3 * f + 2 * h + q);  // what lies behind attention has been used
    int64_t attention = probs + bytes(q) + bytes(2 * q + 2 * kv);  // again, and its gradients
    worst = std::max(worst, blocks - gone + attention + through);
  }
  m.peak = worst;
  return m;
}

double source_activation_bytes(double layers, double length, double sequences, double hidden,
                               double heads, Recompute recompute) {
  double per_element = recompute == Recompute::Full        ? 2
                       : recompute == Recompute::Selective ? 34
                                                           : 34 + 5 * heads * length / hidden;
  return layers * length * sequences * hidden * per_element;
}

double selective_saving(double heads, double length, double hidden) {
  double attention = 5 * heads * length / hidden;
  return attention / (34 + attention);
}

double attention_share(double length, double hidden) {
  double ratio = length / (6 * hidden);
  return ratio / (1 + ratio);
}

double one_more_forward(double length, double hidden) {
  return attention_share(length, hidden) / 3;
}

}  // namespace lockstep
