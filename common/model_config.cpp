#include "common/model_config.h"

#include "common/check.h"

namespace lockstep {

// No dimension of a language model comes near a million. The bound keeps parameters(), a product of
// three of them at most, within 64 bits, so that it cannot overflow on a hostile config.json.
static constexpr int64_t kLargest = 1'000'000;
static constexpr int64_t kMostParameters = 10'000'000'000'000;  // and their bytes, too

static void require_size(int64_t value, const char* what) {
  require(value >= 1 && value <= kLargest, what, " is ", value, "; it must lie between 1 and ",
          kLargest);
}

std::string divisors(int64_t n) {
  std::string out;
  for (int64_t d = 1; d <= n; ++d)
    if (n % d == 0) out += (out.empty() ? "" : ", ") + std::to_string(d);
  return out;
}

void ModelConfig::validate() const {
  require_size(layers, "the number of layers");
  require_size(hidden, "the hidden size");
  require_size(heads, "the number of attention heads");
  require_size(kv_heads, "the number of key/value heads");
  require_size(head_dim, "the size of a head");
  require_size(ffn, "the size of the feed-forward block");
  require_size(vocab, "the size of the vocabulary");
  require(heads % kv_heads == 0, heads, " attention heads cannot share ", kv_heads,
          " key/value heads evenly; the number of key/value heads must be one of ",
          divisors(heads));
  require_size(q_size(), "the number of heads times their size");
  require(head_dim % 2 == 0, "the size of a head is ", head_dim,
          "; it must be even, because rotary embeddings turn pairs of elements");
  require(max_length >= 0, "the longest sequence is ", max_length,
          "; it must be positive, or 0 for no limit");
  require(rope_theta > 0 && rope_theta < 1e12, "the rotary base (rope_theta) is ", rope_theta,
          "; it must be positive, usually 10000 or more");
  require(norm_epsilon > 0 && norm_epsilon < 1, "the epsilon of the norms is ", norm_epsilon,
          "; it must lie between 0 and 1, usually 1e-5");
  require(init_std >= 0 && init_std < 10, "the standard deviation of the first weights is ",
          init_std, "; it must lie between 0 and 10, usually 0.02");
  require(dropout >= 0 && dropout < 1, "the dropout probability is ", dropout,
          "; it must be at least 0 and less than 1");
  require(parameters() <= kMostParameters, "a model of ", double(parameters()),
          " parameters is larger than any: at most ", double(kMostParameters), " are taken");
}

int64_t ModelConfig::parameters() const {
  int64_t attention = hidden * (q_size() + 2 * kv_size()) + q_size() * hidden;  // q, k, v and o
  if (attention_bias) attention += q_size() + 2 * kv_size() + hidden;
  int64_t feed_forward = 3 * hidden * ffn;  // gate, up and down
  if (mlp_bias) feed_forward += 2 * ffn + hidden;
  int64_t block = attention + feed_forward + 2 * hidden;  // and the gains of its two norms
  int64_t table = vocab * hidden;
  return (tied ? 1 : 2) * table + layers * block + hidden;
}

}  // namespace lockstep
