#pragma once
// ZeRO's two promises, beside what a run has measured: the bytes that each rank holds, by category,
// and the elements that a step moves.
//
//   bytes      rank     weights   gradients      master     moments   buffers, peak
//   predicted     0     …
//   measured      0     …                                             …
//
// Both come from the sizes of the flat buckets, so that they are exact: padding is in them. What is
// whole for a moment (gradients from stage 2 on, weights in stage 3) counts as buffers, together
// with batches and the numbers of the step.

#include <cstdio>

#include "03_zero/make_zero.h"
#include "common/mesh.h"
#include "common/options.h"
#include "common/parallel_formulas.h"

namespace lockstep {

struct ZeroPlan {
  ZeroPlan(Stage& model, int stage, DataParallel::Settings settings, Cut data)
      : stage(stage), data(data), compute(model.compute()), gradients(settings.gradients) {
    int64_t elements_each = settings.bucket_bytes / int64_t(size_of(gradients));
    for (const Bucket& bucket : buckets_of(stage, {&model}, elements_each)) {
      sizes.push_back(bucket.size);
      int64_t padded = stage == 0 ? bucket.size : Sharding{bucket.size, data.size}.padded();
      elements += padded;
      auto holds = [&](const Parameter* p) {
        return std::find(bucket.parameters.begin(), bucket.parameters.end(), p) !=
               bucket.parameters.end();
      };
      const Unit& head = *model.units().back();
      if (holds(head.groups[0][0])) kept += padded;
      // A tied head gathers the embedding's table once more.
      if (!head.borrowed.empty() && holds(head.borrowed[0])) kept -= padded;
    }
  }
  ModelMemory memory() const { return zero_memory(sizes, compute, gradients, stage, data); }
  // Elements that a step moves (parallel_formulas.h), with padding.
  int64_t volume(int64_t micro_batches) const {
    return zero_volume(stage, elements, micro_batches, kept);
  }
  std::string formula(int64_t micro_batches) const {
    if (stage <= 1) return "2Ψ";
    if (stage == 2) return text(micro_batches + 1, "Ψ");
    std::string less = kept > 0 ? text(" - ", micro_batches, " x the kept head's ", kept)
                                : text(" + ", micro_batches, " x the ", -kept,
                                       " of the table that the head borrows, less its gain");
    return text(3 * micro_batches, "Ψ", less);
  }

  int stage;
  Cut data;
  DType compute, gradients;
  std::vector<int64_t> sizes;  // of the buckets, without padding
  int64_t elements = 0;        // Ψ, with padding
  int64_t kept = 0;            // of the head
};

// What the ledger has of the data group, in elements: an all-reduce counts as the reduce-scatter
// and the all-gather that it is.
inline int64_t moved_elements(const Ledger& ledger, const std::string& group,
                              const ZeroPlan& plan) {
  auto payload = [&](Collective operation) { return ledger.sum(operation, group).payload; };
  int64_t gradient = int64_t(size_of(plan.gradients)), weight = int64_t(size_of(plan.compute));
  return 2 * payload(Collective::AllReduce) / gradient +
         payload(Collective::ReduceScatter) / gradient + payload(Collective::AllGather) / weight;
}

// All ranks call it, rank 0 prints. The ledger has what one step moved, in the data group `group`
// and elsewhere.
inline void show_accounts(Communicator& world, const ZeroPlan& plan, const std::string& group,
                          int64_t micro_batches) {
  const Ledger step = world.ledger();  // before this talks itself

  const MemoryAccount& account = *memory_account();
  const ModelMemory p = plan.memory();
  char lines[400];
  auto n = [](int64_t x) { return static_cast<long long>(x); };
  std::snprintf(lines, sizeof lines,
                "predicted  %4d %13lld %13lld %13lld %13lld\n"
                "measured   %4d %13lld %13lld %13lld %13lld %13lld\n",
                world.rank(), n(p.weights), n(p.gradients), n(p.master), n(p.moments), world.rank(),
                n(account.now(Category::Weights)), n(account.now(Category::Gradients)),
                n(account.now(Category::Master)), n(account.now(Category::Moments)),
                n(account.peak(Category::Buffers)));
  const std::vector<std::string> tables = world.gather_texts(lines);
  if (world.rank() != 0) return;
  std::printf("bytes      rank %13s %13s %13s %13s %13s\n", "weights", "gradients", "master",
              "moments", "buffers, peak");
  for (const std::string& table : tables) std::printf("%s", table.c_str());
  std::printf(
      "moved      %lld elements in a step, predicted %lld = %s with Ψ = %lld; a rank sent "
      "%lld bytes\n",
      n(moved_elements(step, group, plan)), n(plan.volume(micro_batches)),
      plan.formula(micro_batches).c_str(), n(plan.elements),
      n(step.sum(Collective::AllReduce, group).wire +
        step.sum(Collective::ReduceScatter, group).wire +
        step.sum(Collective::AllGather, group).wire));
  std::fflush(stdout);
}

}  // namespace lockstep
