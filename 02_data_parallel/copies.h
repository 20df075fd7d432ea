#pragma once
// Parameters that several ranks hold alike (parameter.h): who counts them, and how their gradients
// come together over axes other than the data's.

#include <algorithm>

#include "common/mesh.h"
#include "common/ops.h"

namespace lockstep {

inline constexpr AxisSet kDataAxes = {Axis::Data, Axis::ExpertData};

// Of the ranks that hold the same elements, one counts them. Over the data's axes, where nearly all
// is held alike, ranks take turns: none has to square all gradients for the norm, or to write a
// checkpoint alone. Over the others it is the first.
inline bool counts_copies(ProcessMesh& mesh, AxisSet replicas, size_t number) {
  for (Axis axis : {Axis::Data, Axis::ExpertData, Axis::TP, Axis::KvCopies, Axis::Ends}) {
    if (!replicas.has(axis)) continue;
    Communicator& group = mesh.group(axis);
    size_t turn = kDataAxes.has(axis) ? number % size_t(group.size()) : 0;
    if (size_t(group.rank()) != turn) return false;
  }
  return true;
}

// Gradients that tensor or pipeline parallelism left in parts: elements [first, first + the size of
// `gradients`) of parameters that lie one behind the other. Ranks that add theirs have the same
// layout: their parameters have the same sizes.
inline void sum_over_model_axes(ProcessMesh& mesh, const Weights& parameters,
                                const Tensor& gradients, int64_t first = 0) {
  int64_t begin = 0;
  for (size_t i = 0; i < parameters.size();) {  // runs of parameters that are summed alike
    AxisSet axes = parameters[i]->sum_over;
    int64_t end = begin;
    for (; i < parameters.size() && parameters[i]->sum_over == axes; ++i)
      end += parameters[i]->size();
    int64_t from = std::max(begin - first, int64_t(0));
    int64_t to = std::min(end - first, gradients.size());
    for (Axis axis : {Axis::TP, Axis::KvCopies, Axis::Ends})
      if (axes.has(axis) && from < to)
        mesh.group(axis).all_reduce(gradients.flat(from, to - from)).wait();
    begin = end;
  }
}

}  // namespace lockstep
