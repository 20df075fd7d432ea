#pragma once
// How a run is planned, and what more GPUs bring, computed before any is rented.
//
//   global batch (tokens)  =  micro-batch  x  sequence  x  accumulation  x  GPUs
//   what training needs       what fits       2-8k         what is left     what there is
//
// The batch is a choice of training, the micro-batch one of memory; accumulation is their quotient,
// and has to be a whole number. Nothing is rounded: where it is none, a sentence says which choices
// near by would do. The Ultra-Scale Playbook (Hugging Face 2025), "Our journey up to now".
//
// A step, when every GPU computes one micro-batch and gradients travel in buckets:
//
//   compute   forward | backward b0  b1  b2 |         | optimizer
//   network                       | b0 | b1 | b2 |
//                                           ╰───╯ exposed: nobody computes meanwhile

#include <algorithm>
#include <cmath>
#include <functional>
#include <utility>

#include "common/memory_model.h"
#include "common/parallel_formulas.h"

namespace lockstep {

// The largest number of sequences, at most kMostSequences, whose step fits into so many bytes; 0:
// not even one does. It doubles until it does not fit, and then closes in.
inline constexpr int64_t kMostSequences = 1'000'000;
inline int64_t largest_micro_batch(int64_t bytes, const std::function<int64_t(int64_t)>& needs) {
  int64_t fits = 0, too_many = 1;
  while (too_many <= kMostSequences && needs(too_many) <= bytes)
    fits = std::exchange(too_many, 2 * too_many);
  too_many = std::min(too_many, kMostSequences + 1);
  while (too_many - fits > 1) {
    int64_t middle = (fits + too_many) / 2;
    (needs(middle) <= bytes ? fits : too_many) = middle;
  }
  return fits;
}

// The divisors of n that are nearest to x: the last one up to it and the first one above it.
inline std::vector<int64_t> nearest_divisors(int64_t n, int64_t x) {
  int64_t below = 1, above = n;
  for (int64_t small = 1; small * small <= n; ++small) {
    if (n % small != 0) continue;
    for (int64_t divisor : {small, n / small}) {
      if (divisor <= x) {
        below = std::max(below, divisor);
      } else {
        above = std::min(above, divisor);
      }
    }
  }
  if (above <= x) return {below};
  return {below, above};
}

inline std::string listed(const std::vector<int64_t>& values) {  // "64 or 128"
  return values.size() == 1 ? text(values[0]) : text(values[0], " or ", values[1]);
}

// The multiples of `part` that are nearest to a number of tokens that is none.
inline std::vector<int64_t> nearest_batches(int64_t tokens, int64_t part) {
  int64_t below = tokens / part * part;
  if (below == 0) return {part};
  return {below, below + part};
}

// Tokens of a batch as sequences, or a sentence with valid choices.
inline int64_t sequences_in(int64_t batch_tokens, int64_t sequence) {
  require(batch_tokens % sequence == 0, "a global batch of ", batch_tokens,
          " tokens is no whole number of sequences of ", sequence, ": use ",
          listed(nearest_batches(batch_tokens, sequence)));
  return batch_tokens / sequence;
}

// Micro-batches that each GPU computes in a step, or a sentence with valid choices.
inline int64_t accumulation_steps(int64_t batch_tokens, int64_t sequence, int64_t micro_batch,
                                  int64_t gpus) {
  int64_t sequences = sequences_in(batch_tokens, sequence), at_once = micro_batch * gpus;
  if (sequences % at_once == 0) return sequences / at_once;
  std::string choices;
  if (sequences % gpus == 0)
    choices += text("micro-batches of ", nearest_divisors(sequences / gpus, micro_batch)[0], ", ");
  if (sequences % micro_batch == 0)
    choices += text(listed(nearest_divisors(sequences / micro_batch, gpus)), " GPUs, ");
  if (!choices.empty()) choices += "or ";
  fail(text(sequences, " sequences over ", gpus, " GPUs in micro-batches of ", micro_batch,
            " make ", double(sequences) / double(at_once),
            " accumulation steps, no whole number: use ", choices, "a global batch of ",
            listed(nearest_batches(batch_tokens, at_once * sequence)), " tokens"));
}

// What the hardware does. The defaults of recipe.cpp say where the numbers come from.
struct Cluster {
  Hardware gpu;         // flops as reached, not as printed on the box
  double latency;       // seconds of one message
  double bucket_bytes;  // gradients that travel as one
};

// A step on one GPU of many.
struct StepTime {
  double compute;       // forward and backward
  RingTime all_reduce;  // of all buckets
  double exposed;       // what of it does not hide behind backward
  double total() const { return compute + exposed; }
  double hidden() const { return std::max(0.0, all_reduce.total() - exposed); }
};

// Bucket b is full when that share of backward is done; the network carries one after the other. So
// at least the last one is exposed. Where a bucket fills faster than it travels, only the first
// one's filling hides anything.
inline double exposed_time(double backward, int64_t buckets, double each) {
  double fills = backward / double(buckets);
  return each <= fills ? each : fills + double(buckets) * each - backward;
}

// tokens: of one GPU. forward and all: operations per token.
inline StepTime step_time(double tokens, double forward, double all, double gradient_bytes,
                          double gpus, const Cluster& cluster) {
  int64_t buckets = int64_t(std::ceil(gradient_bytes / cluster.bucket_bytes));
  RingTime each = ring_all_reduce_time(gradient_bytes / double(buckets), gpus,
                                       cluster.gpu.bandwidth, cluster.latency);
  double backward = tokens * (all - forward) / cluster.gpu.flops;
  return {tokens * all / cluster.gpu.flops,
          {double(buckets) * each.moving, double(buckets) * each.waiting},
          exposed_time(backward, buckets, each.total())};
}

}  // namespace lockstep
