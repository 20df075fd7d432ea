#pragma once
// Parameters that several ranks hold alike (parameter.h): who counts them, and how their gradients
// come together over axes other than the data's.

#include "common/mesh.h"

namespace lockstep {

inline constexpr AxisSet kDataAxes = {Axis::Data, Axis::ExpertData};

// Of the ranks that hold the same elements, the first one counts them.
inline bool first_of_copies(ProcessMesh& mesh, AxisSet replicas) {
  for (Axis axis : {Axis::Data, Axis::ExpertData, Axis::TP, Axis::KvCopies, Axis::Ends})
    if (replicas.has(axis) && mesh.group(axis).rank() > 0) return false;
  return true;
}

// Gradients that tensor or pipeline parallelism left in parts. Buckets of equal `sum_over` have the
// same length on all ranks of these axes.
inline void sum_over_model_axes(ProcessMesh& mesh, const Tensor& gradients, AxisSet sum_over) {
  for (Axis axis : {Axis::TP, Axis::KvCopies, Axis::Ends})
    if (sum_over.has(axis)) mesh.group(axis).all_reduce(gradients).wait();
}

}  // namespace lockstep
