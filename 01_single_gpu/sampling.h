#pragma once
// Which token comes next? The model gives every token a probability, softmax(logits). Always taking
// the likeliest one ends in loops; drawing from all of them picks, sooner or later, one of the many
// that are each a little wrong.
//
//   temperature   divides the logits: below 1 the likely become likelier, 0 is the likeliest alone
//   top-k         draws from the k likeliest. Fan, Lewis, Dauphin, "Hierarchical neural story
//                 generation" (ACL 2018), section 5.3
//   top-p         draws from the smallest set of likeliest tokens that hold the probability p: few
//                 where the model is sure, many where it is not. Holtzman et al., "The curious case
//                 of neural text degeneration" (ICLR 2020), section 3.1
//
// They apply in this order, each to what the one before left. Between equal logits the smaller id
// counts as likelier, so that the same seed gives the same text everywhere.

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "common/evaluate.h"

namespace lockstep {

struct Sampling {
  double temperature = 0.8;
  int64_t top_k = 0;  // 0: all
  double top_p = 1;   // (0, 1]
};

// The logits of the tokens that may be drawn; -inf in the place of the others.
inline std::vector<float> keep_likely(const std::vector<float>& logits, const Sampling& s) {
  auto less_likely = [&](int32_t a, int32_t b) {
    float x = logits[size_t(a)], y = logits[size_t(b)];
    return x != y ? x < y : a > b;
  };
  std::vector<int32_t> rest(logits.size()), kept;
  std::iota(rest.begin(), rest.end(), 0);
  if (s.top_k > 0 && s.top_k < int64_t(rest.size())) {
    auto likelier = [&](int32_t a, int32_t b) { return less_likely(b, a); };
    std::nth_element(rest.begin(), rest.begin() + s.top_k, rest.end(), likelier);
    rest.resize(size_t(s.top_k));
  }
  if (s.top_p < 1) {
    float largest = *std::max_element(logits.begin(), logits.end());
    auto weight = [&](int32_t id) {
      return std::exp((double(logits[size_t(id)]) - double(largest)) / s.temperature);
    };
    double wanted = 0, held = 0;
    for (int32_t id : rest) wanted += s.top_p * weight(id);
    // A heap gives the likeliest first and sorts no more of the vocabulary than is needed.
    std::make_heap(rest.begin(), rest.end(), less_likely);
    while (held < wanted && !rest.empty()) {
      std::pop_heap(rest.begin(), rest.end(), less_likely);
      kept.push_back(rest.back());
      held += weight(rest.back());
      rest.pop_back();
    }
  } else {
    kept = rest;
  }
  std::vector<float> out(logits.size(), -std::numeric_limits<float>::infinity());
  for (int32_t id : kept) out[size_t(id)] = logits[size_t(id)];
  return out;
}

// The token that a uniform number u in [0, 1) picks.
inline int32_t next_token(const std::vector<float>& logits, const Sampling& s, double u) {
  for (size_t i = 0; i < logits.size(); ++i)
    require(std::isfinite(logits[i]), "the model gives token ", i, " the logit ", logits[i],
            ": its weights are damaged, or its numbers too large for this type");
  return pick(s.temperature == 0 ? logits : keep_likely(logits, s), s.temperature, u);
}

}  // namespace lockstep
