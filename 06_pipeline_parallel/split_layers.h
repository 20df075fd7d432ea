#pragma once
// Which layers each stage holds. The head's matmul and the loss cost as much as several layers
// where the vocabulary is large, so even numbers of layers are not even work:
//
//   evenly     30 layers, 4 stages    8 8 7 7           larger parts first
//   by cost    + a head worth 4       9 9 8 4 + head    no stage takes longer than it must
//
// Every layer is in exactly one stage, in order.

#include <cstdio>
#include <memory>

#include "06_pipeline_parallel/schedule.h"
#include "common/model.h"
#include "common/options.h"

namespace lockstep {

// What the ends cost, in layers: 0 each for an even split.
struct EndCosts {
  double embedding = 0, head = 0;
};

// Forward operations of the head over those of a layer, per token: V H against the layer's matrices
// and attention's two products.
inline EndCosts end_costs(const ModelConfig& c, int64_t length) {
  double attention = double(c.hidden) * double(2 * c.q_size() + 2 * c.kv_size());
  double layer = attention + 3 * double(c.hidden * c.ffn) + double(length * c.q_size());
  return {0, double(c.vocab * c.hidden) / layer};
}

inline std::vector<StageSpan> split_layers(int64_t layers, const Placement& placement,
                                           EndCosts ends = {}) {
  int stages = placement.stages();
  require(stages <= layers, layers, layers == 1 ? " layer" : " layers", " cannot be cut over ",
          stages, " stages, which leaves a stage without a layer: at most ", layers, " stages");
  std::vector<int64_t> counts(size_t(stages), 1);  // no stage is empty
  auto cost = [&](int s) {
    return double(counts[size_t(s)]) + (s == 0 ? ends.embedding : 0) +
           (s == stages - 1 ? ends.head : 0);
  };
  for (int64_t left = layers - stages; left > 0; --left) {  // each goes where least is
    int cheapest = 0;
    for (int s = 1; s < stages; ++s)
      if (cost(s) < cost(cheapest)) cheapest = s;
    ++counts[size_t(cheapest)];
  }
  std::vector<StageSpan> spans;
  int64_t first = 0;
  for (int s = 0; s < stages; ++s) {
    int64_t count = counts[size_t(s)];
    spans.push_back({first, count, s == 0, s == stages - 1, !placement.ends_share_a_rank()});
    first += count;
  }
  return spans;
}

// This rank's stages, chunk by chunk. Where a tied table's both ends are here, they share it.
inline std::vector<std::unique_ptr<Stage>> make_stages(const Options& options, const Parts& parts,
                                                       const Placement& placement, int rank,
                                                       const std::vector<StageSpan>& spans) {
  std::vector<std::unique_ptr<Stage>> stages;
  for (int c = 0; c < placement.chunks; ++c) {
    Parameter* table = stages.empty() ? nullptr : stages[0]->table();
    stages.push_back(std::make_unique<Stage>(options.config, parts, options.compute, options.device,
                                             spans[size_t(placement.stage(rank, c))],
                                             options.config.tied ? table : nullptr));
  }
  return stages;
}

inline void print_stages(const Placement& placement, const std::vector<StageSpan>& spans) {
  for (int rank = 0; rank < placement.ranks; ++rank) {
    std::string what;
    for (int c = 0; c < placement.chunks; ++c) {
      const StageSpan& span = spans[size_t(placement.stage(rank, c))];
      what += text(c > 0 ? ", then " : "", span.embedding ? "embedding, " : "", "layers ",
                   span.first_layer, " to ", span.first_layer + span.layers - 1,
                   span.head ? ", head" : "");
    }
    std::printf("stages  rank %d has %s\n", rank, what.c_str());
  }
}

}  // namespace lockstep
