#pragma once
// Around every unit of the model: its weights are there while it computes, forward and backward.
// On the tape, backward meets the marks in reverse:
//
//   forward    acquire   mark "release"   unit …   mark "acquire"   release
//   backward             ◀ release        ◀ unit   ◀ acquire
//
// Wrapped around recomputation, so that one acquire serves a unit's second forward and its
// backward.

#include <memory>

#include "common/strategy.h"

namespace lockstep {

// `parallel` may be set later, before the model computes for the first time.
inline void use_zero(Parts& parts, const std::unique_ptr<DataParallel>& parallel) {
  using Pass = DataParallel::Pass;
  parts.around = [inner = parts.around, &parallel](Tape& tape, const Var& x, Unit& unit,
                                                   const Body& body) {
    Pass pass = tape.records() ? Pass::Forward : Pass::Evaluation;
    parallel->acquire(unit, pass);
    tape.mark("release", [p = parallel.get(), &unit, &tape] {
      for (const Weights& group : unit.groups)
        for (Parameter* weight : group)
          if (!tape.uses(weight)) p->unused(*weight);
      p->release(unit, Pass::Backward);
    });
    Var out = inner(tape, x, unit, body);
    tape.mark("acquire", [p = parallel.get(), &unit] { p->acquire(unit, Pass::Backward); });
    parallel->release(unit, pass);
    return out;
  };
}

}  // namespace lockstep
