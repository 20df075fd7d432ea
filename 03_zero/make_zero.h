#pragma once
// The strategy of the data axis by its number, as command lines say it.

#include <memory>

#include "02_data_parallel/bucketed.h"
#include "03_zero/zero3.h"

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

}  // namespace lockstep
