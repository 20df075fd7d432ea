#pragma once
// The strategy of the data axis by its number, as command lines say it.

#include <memory>

#include "02_data_parallel/bucketed.h"
#include "03_zero/zero3.h"
#include "common/memory_model.h"

namespace lockstep {

inline std::unique_ptr<DataParallel> make_zero(
    int stage, std::vector<Stage*> chunks, ProcessMesh& mesh, DataParallel::Settings settings,
    Zero1::Gather gather = Zero1::Gather::DuringForward) {
  switch (stage) {
    case 0: return std::make_unique<Bucketed>(chunks, mesh, settings);
    case 1: return std::make_unique<Zero1>(chunks, mesh, settings, gather);
    case 2: return std::make_unique<Zero2>(chunks, mesh, settings, gather);
    case 3: return std::make_unique<Zero3>(chunks, mesh, settings);
  }
  fail(text("there is no stage ", stage, " of ZeRO: 0 to 3 are valid"));
}

// The buckets that it makes of a rank's stages.
inline std::vector<Bucket> buckets_of(int stage, const std::vector<Stage*>& chunks,
                                      int64_t bucket_elements) {
  if (stage == 3) return make_buckets(chunks, INT64_MAX, CutAt::Units);
  return make_buckets(chunks, bucket_elements, stage == 2 ? CutAt::Units : CutAt::Size);
}

// The bytes that a rank will hold, before it holds them.
inline ModelMemory memory_of_rank(int stage, const std::vector<Stage*>& chunks, ProcessMesh& mesh,
                                  DataParallel::Settings settings) {
  int64_t elements = settings.bucket_bytes / int64_t(size_of(settings.gradients));
  std::vector<int64_t> sizes;
  for (const Bucket& bucket : buckets_of(stage, chunks, elements)) sizes.push_back(bucket.size);
  Cut data{mesh.data().rank(), mesh.data().size()};
  return zero_memory(sizes, chunks[0]->compute(), settings.gradients, stage, data);
}

}  // namespace lockstep
