#pragma once
// The bubble from formulas, to print beside what the simulator says and what was measured. p ranks,
// m micro-batches, equal stages, free messages; F, I and W are the times of one rank's layers, all
// of its chunks together, for one micro-batch.
//
//     idle time of a rank, on the clock                        holds for
//     afab, 1f1b     (p - 1)(F + I + W)                        any m
//     interleaved    (p - 1)(F + I + W)/v                      m a multiple of p
//     zb-h1          (p - 1)(F + I - W)                        m >= p, W no longer than F and I
//     zb-h2          (p - 1) F, and 0 on its own span          m >= 2p - 1, F = I = W
//     zb-v           (p - 1) F/2, and 0 on its own span        m >= 2p - 1, F = I = W
//     dualpipe-v     (p - 1) F/2                               m >= 2p, F = I = W
//
// Elsewhere the simulator alone speaks. Some papers write B for I alone, others for I and W
// together: with F = B = W = 1 in the first sense 1F1B idles for (p - 1)(F + B + W) and ZB-H1 for
// (p - 1)(F + B - W), a third of that.

#include <optional>
#include <string>

#include "common/parallel_formulas.h"

namespace lockstep {

struct StepTimes {
  double forward = 1, input = 1, weight = 1;
  double all() const { return forward + input + weight; }
};

// The source's two definitions; the ideal step has no bubble and takes m (F + I + W).
inline double bubble_of_ideal(double p, double m, double v = 1) { return (p - 1) / (v * m); }
inline double bubble_of_clock(double p, double m, double v = 1) {
  return (p - 1) / (v * m + p - 1);
}

// Without micro-batches one rank works and p - 1 wait.
inline double naive_bubble(double p) { return bubble_of_ideal(p, 1); }

// Idle time of each rank on the clock; nothing where there is no closed form.
inline std::optional<double> idle_on_clock(const std::string& schedule, int p, int v, int m,
                                           StepTimes t) {
  bool equal = t.forward == t.input && t.input == t.weight;
  double fill = p - 1;
  if (schedule == "afab" || schedule == "1f1b") return fill * t.all();
  if (schedule == "interleaved" && m % p == 0) return fill * t.all() / v;
  if (schedule == "zb-h1" && m >= p && t.weight <= t.forward && t.weight <= t.input)
    return fill * (t.forward + t.input - t.weight);
  if (schedule == "zb-h2" && m >= 2 * p - 1 && equal) return fill * t.forward;
  if (schedule == "zb-v" && m >= 2 * p - 1 && equal) return fill * t.forward / 2;
  if (schedule == "dualpipe-v" && m >= 2 * p && equal) return fill * t.forward / 2;
  return {};
}
// And of rank r between its own first and last action.
inline std::optional<double> idle_on_span(const std::string& schedule, int p, int m, int rank,
                                          StepTimes t) {
  bool equal = t.forward == t.input && t.input == t.weight;
  if (schedule == "afab" || schedule == "1f1b") return (p - 1 - rank) * t.all();
  if ((schedule == "zb-h2" || schedule == "zb-v") && m >= 2 * p - 1 && equal) return 0;
  return {};
}

// Does a message hide behind the next stage's forward? Below 1 it does (The Ultra-Scale Playbook,
// appendix A3): b s h elements against 32 b s h² operations in each of its layers.
//
//     b s h bytes / bandwidth                 bytes       flops
//     -----------------------------   =   ------------ · ---------
//     32 b s h² layers / flops            32 h layers    bandwidth
//
// A3 prints it without the size of an element.
inline double message_overlap(double h, double layers, double element_bytes, Hardware on) {
  return element_bytes * on.flops / (32 * h * layers * on.bandwidth);
}

// Elements that cross in a step: forward and backward, at each boundary between ranks.
inline int64_t message_volume(int64_t m, int64_t tokens, int64_t h) { return 2 * m * tokens * h; }

}  // namespace lockstep
