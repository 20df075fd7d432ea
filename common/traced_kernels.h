#pragma once
// Makes every kernel visible in a trace without touching a call: each slot of the kernel table
// (kernels.h) gets a small function that opens a span, calls what was in the slot, and closes it.
//
//     before   on(x).rope ──────────────▶ rope's kernel
//     while    on(x).rope ──▶ span "rope" ──▶ rope's kernel
//
// A thread without a recording trace (trace.h) passes through at the cost of a branch.

namespace lockstep {

// Wraps the tables of all devices that are there, from the first of these objects to the last. The
// tables belong to the whole process: where ranks are threads, make one before they start.
class TracedKernels {
 public:
  TracedKernels();
  ~TracedKernels();
  TracedKernels(const TracedKernels&) = delete;
};

}  // namespace lockstep
