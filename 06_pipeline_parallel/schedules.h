#pragma once
// The schedules by name, for command lines and tests.
//
//     name          chunks   micro-batches    idle, F = I = W, of one rank   holds
//     afab          1        any              (p - 1)(F + I + W)             m
//     1f1b          1        any              (p - 1)(F + I + W)             p
//     interleaved   v        multiple of p    (p - 1)(F + I + W)/v           p + (p - 1)/v
//     zb-h1         1        any              (p - 1)(F + I - W)             p
//     zb-h2         1        any              none on its own span           2p - 1
//     zb-v          2        any              none on its own span           p
//     dualpipe-v    2        at least 2p      p - 1 chunk steps              p + 1/2
//
// p: ranks. "holds": activations of stages (v chunks make one) on the busiest rank, given enough
// micro-batches.

#include "06_pipeline_parallel/afab.h"
#include "06_pipeline_parallel/dualpipe_v.h"
#include "06_pipeline_parallel/interleaved.h"
#include "06_pipeline_parallel/zb_v.h"
#include "06_pipeline_parallel/zero_bubble_h2.h"

namespace lockstep {

struct PlacedSchedule {
  Schedule schedule;
  Placement placement;
};

inline const std::vector<std::string>& schedule_names() {
  static const std::vector<std::string> names{"afab",  "1f1b", "interleaved", "zb-h1",
                                              "zb-h2", "zb-v", "dualpipe-v"};
  return names;
}

// chunks 0: as many as the schedule is made for. group: micro-batches that visit a chunk in a row,
// for interleaved alone; 0: one per rank, which is depth first.
inline PlacedSchedule make_schedule(const std::string& name, int ranks, int chunks,
                                    int micro_batches, int group = 0) {
  require(ranks >= 1 && micro_batches >= 1, "a pipeline needs ranks and micro-batches, not ", ranks,
          " and ", micro_batches);
  bool v_shaped = name == "zb-v" || name == "dualpipe-v", loop = name == "interleaved";
  require(loop || group == 0, "--group is for --schedule interleaved, not for ", name);
  if (chunks == 0) chunks = v_shaped || loop ? 2 : 1;
  require(loop || chunks == (v_shaped ? 2 : 1), "schedule ", name, " has ",
          v_shaped ? "2 chunks" : "1 chunk", " on each rank, not ", chunks);
  Placement placement{v_shaped ? Placement::V : Placement::Loop, ranks, chunks};
  if (name == "afab") return {afab(ranks, micro_batches), placement};
  if (name == "1f1b") return {one_f_one_b(ranks, micro_batches), placement};
  if (name == "zb-h1") return {zero_bubble_h1(ranks, micro_batches), placement};
  if (name == "zb-h2") return {zero_bubble_h2(ranks, micro_batches), placement};
  if (name == "zb-v") return {zb_v(ranks, micro_batches), placement};
  if (name == "dualpipe-v") return {dualpipe_v(ranks, micro_batches), placement};
  if (loop)
    return {interleaved(ranks, chunks, micro_batches, group == 0 ? ranks : group), placement};
  std::string known;
  for (const std::string& n : schedule_names()) known += text(known.empty() ? "" : ", ", n);
  fail(text("no schedule is called ", name, ": use one of ", known));
}

}  // namespace lockstep
