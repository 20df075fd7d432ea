#pragma once
// What data parallelism and ZeRO cost, from formulas: bytes that a rank holds, elements that it
// sends, and whether sending can hide behind computing. Ψ parameters, N ranks of the data axis.
//
//   stage   a rank holds                              a step of m micro-batches moves
//   0       (w + g + k)Ψ                              2Ψ        all-reduce, once a step
//   1       (w + g)Ψ + kΨ/N                           2Ψ        reduce-scatter, all-gather
//   2       wΨ + (g + k)Ψ/N                           (m + 1)Ψ  a reduce-scatter per micro-batch
//   3       (w + g + k)Ψ/N                            3mΨ       and two gathers: forward, backward
//
// w, g: bytes of a weight and of a gradient; k: of what the optimizer keeps, master and moments (4
// + 8 for AdamW). Rajbhandari et al., "ZeRO: Memory optimizations toward training trillion
// parameter models" (2020), sections 5 and 7; The Ultra-Scale Playbook (Hugging Face 2025), "ZeRO"
// and appendix A3. Both have w = g = 2, k = 12 and m = 1: 1x, 1x, 1x and 1.5x what an all-reduce
// moves.

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

namespace lockstep {

struct BytesPerParameter {
  double weight = 2, gradient = 2, master = 4, moments = 8;
};
// Of one rank, without padding (zero_memory() in memory_model.h has it).
inline double zero_bytes_per_parameter(int stage, double ranks, BytesPerParameter b = {}) {
  double cut = 1 / ranks;
  return b.weight * (stage >= 3 ? cut : 1) + b.gradient * (stage >= 2 ? cut : 1) +
         (b.master + b.moments) * (stage >= 1 ? cut : 1);
}

// Elements that pass through a rank's collectives in a step, an all-reduce counted as the
// reduce-scatter and all-gather that it is. `kept`: parameters of the last unit (ZeRO-3), which
// stays from its forward to its backward and is gathered once, not twice. A tied head borrows the
// embedding's table and gathers it one time more: kept is its norm's gain less the table.
inline int64_t zero_volume(int stage, int64_t parameters, int64_t micro_batches, int64_t kept = 0) {
  if (stage <= 1) return 2 * parameters;
  if (stage == 2) return (micro_batches + 1) * parameters;
  return micro_batches * (3 * parameters - kept);
}
// What of it a rank sends: all parts but its own.
inline double on_the_wire(double volume, double ranks) { return volume * (ranks - 1) / ranks; }

// All-gathers of ZeRO-3 in a micro-batch. The units are the embedding, L blocks and the head; the
// source counts L blocks alone, 2L - 1. A tied head makes it 2U: one for its norm, one for the
// table.
inline int64_t zero3_units(int64_t layers) { return layers + 2; }
inline int64_t zero3_gathers(int64_t units) { return 2 * units - 1; }

// Does communication hide behind computation? Below 1 it does. Bandwidth is in bytes per second, so
// elements are multiplied by their size.
struct Hardware {
  double flops;      // per second
  double bandwidth;  // bytes per second that a rank sends
};

// All gradients travel while backward computes (A3). Both times grow with Ψ, which cancels:
//
//   2Ψ (N-1)/N bytes / bandwidth            bytes   N-1    flops
//   ----------------------------   =   ---------- · --- · ---------
//         4 tokens Ψ / flops           2 · tokens    N    bandwidth
//
// A3 prints this with Ψ left in, and without the size of an element. `tokens` are those of one
// rank's last micro-batch: gradients of earlier ones do not travel.
inline double gradient_overlap(double parameters, double tokens, double ranks, double element_bytes,
                               Hardware on) {
  double sending = on_the_wire(2 * parameters, ranks) * element_bytes / on.bandwidth;
  double computing = 4 * tokens * parameters / on.flops;
  return sending / computing;
}

// ZeRO-3 gathers the next block, of 16h² weights, while this one computes forward (A3):
// 16h² (N-1)/N bytes / bandwidth against 32 · sequence · micro-batch · h² / flops. Again the size
// cancels, and the ratio is the one above: half the bytes, half the operations.
inline double gather_overlap(double h, double tokens, double ranks, double element_bytes,
                             Hardware on) {
  double sending = on_the_wire(16 * h * h, ranks) * element_bytes / on.bandwidth;
  double computing = 32 * tokens * h * h / on.flops;
  return sending / computing;
}

// An all-reduce of so many bytes on a ring: 2 (N-1) messages one after the other, each with an N-th
// of the bytes. With more ranks messages get smaller, and their number, each with its latency,
// larger: beyond N = bytes / (bandwidth · latency) latency takes more time than the bytes do.
struct RingTime {
  double moving, waiting;  // seconds: bytes / bandwidth, and latency
  double total() const { return moving + waiting; }
};
inline RingTime ring_all_reduce_time(double bytes, double ranks, double bandwidth, double latency) {
  double messages = 2 * (ranks - 1);
  return {messages * (bytes / ranks) / bandwidth, messages * latency};
}

// ---- Tensor parallelism (04) ----

// Elements that pass through a rank's collectives for a micro-batch of T tokens, H wide. A layer
// has two all-reduces of [T, H] forward and two backward, 2 TH each; the embedding has one forward,
// the head one backward. As all-gathers and reduce-scatters (sequence parallelism) they are the
// same. Gathering again adds an all-gather for each of the 2L + 1 column-linears. The loss's 2
// numbers a token and rank come on top.
inline double tensor_volume(double layers, double tokens, double hidden,
                            bool gathers_again = false) {
  double stream = tokens * hidden, columns = 2 * layers + 1;
  return (8 * layers + 4) * stream + (gathers_again ? columns * stream : 0);
}

// Does the all-gather of [T, h] hide behind the h x h column-linear that waits for it (A3)?
//
//   T h (N-1)/N elements · bytes / bandwidth        bytes · (N-1)     flops
//   ----------------------------------------   =    ------------- · ---------
//             2 T h² / N / flops                         2h         bandwidth
//
// Tokens cancel: neither a longer sequence nor a larger micro-batch helps, a wider model does. (A3
// leaves out the size of an element.)
inline double tensor_overlap(double h, double tokens, double ranks, double element_bytes,
                             Hardware on) {
  double sending = on_the_wire(tokens * h, ranks) * element_bytes / on.bandwidth;
  double computing = 2 * tokens * h * h / ranks / on.flops;
  return sending / computing;
}

// Why tensor parallelism stays inside of a node. Its all-reduces wait for nobody else's work and
// nobody's work for them, so a layer takes its matmuls, an N-th on each rank, and four all-reduces.
// Inside of a node bus bandwidth is measured (02's bandwidth program, at a few sizes); a ring that
// leaves it goes no faster than a rank's network, and each of its messages has a latency.
struct Nodes {
  struct Measured {
    double bytes, bandwidth;
  };
  double flops;
  std::vector<Measured> node;  // ascending sizes; log-linear between them
  double network, latency;     // of one rank
  double ranks_of_a_node = 8;

  double bandwidth(double bytes, double ranks) const {
    double bus = node.back().bandwidth;
    for (size_t i = node.size(); i-- > 1;) {
      const Measured &a = node[i - 1], &b = node[i];
      if (bytes > b.bytes) break;
      double way = std::log(bytes / a.bytes) / std::log(b.bytes / a.bytes);
      bus = a.bandwidth + way * (b.bandwidth - a.bandwidth);
    }
    return ranks > ranks_of_a_node ? std::min(bus, network) : bus;
  }
};
// Forward and backward of T tokens: 72 T h² operations (4h wide in between), four all-reduces.
inline double tensor_layer_time(double h, double tokens, double ranks, double element_bytes,
                                const Nodes& on) {
  double computing = 72 * tokens * h * h / ranks / on.flops;
  if (ranks == 1) return computing;
  double bytes = tokens * h * element_bytes;
  double latency = ranks > on.ranks_of_a_node ? on.latency : 0;  // else it is in the measurement
  RingTime ring = ring_all_reduce_time(bytes, ranks, on.bandwidth(bytes, ranks), latency);
  return computing + 4 * ring.total();
}

}  // namespace lockstep
