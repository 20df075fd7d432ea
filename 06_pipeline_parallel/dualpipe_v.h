#pragma once
// DualPipeV: two streams of micro-batches cross on every rank, one in its forward and one in its
// backward, so that one can compute while the other one's messages travel (made for experts, whose
// all-to-all is as long as their matmuls). DualPipe sends them in from both ends and needs every
// layer twice; folded into a V the second stream is the first one on its way up, and each rank
// holds two different chunks.
//
//     rank 0   F F F F F F  F f  i w f  i w f  i w f  F b f B  F b f B  …     F, B: left chunk
//     rank 3                F f F f F f F f  F b f B  F b f B  …              f, b: right chunk
//                                            ╰─────╯
//                                            F with b and f with B: pairs that may overlap. As
//                                            data the second simply follows the first
//
// Cost: with F = I = W and nothing overlapped every rank idles for p - 1 chunk steps; m >= 2p. It
// holds 2p + 1 chunks: p stages and a half.
//
// DeepSeek-AI, "DeepSeek-V3 technical report" (2024), section 3.2.1, and its repository DualPipe;
// the V is Sea AI Lab's cut-in-half ("DualPipe could be better without the dual", 2025).

#include "06_pipeline_parallel/schedule.h"

namespace lockstep {

inline Schedule dualpipe_v(int p, int m) {
  require(m >= 2 * p, "DualPipeV on ", p, " ranks needs at least ", 2 * p, " micro-batches, not ",
          m);
  Schedule schedule(p);
  for (int rank = 0; rank < p; ++rank) {
    int forwards[2] = {}, backwards[2] = {}, below = p - 1 - rank;
    std::vector<Action> late;  // weights, oldest first
    size_t weights = 0;
    auto F = [&](int c) { schedule[rank].push_back({Action::F, c, forwards[c]++}); };
    auto B = [&](int c) { schedule[rank].push_back({Action::B, c, backwards[c]++}); };
    auto I = [&](int c) {
      late.push_back({Action::W, c, backwards[c]});
      schedule[rank].push_back({Action::I, c, backwards[c]++});
    };
    auto W = [&] { schedule[rank].push_back(late[weights++]); };

    for (int i = 0; i < 2 * below; ++i) F(0);
    for (int i = 0; i <= rank; ++i) F(0), F(1);
    for (int i = 0; i < below; ++i) I(1), W(), F(1);
    for (int i = 0; i < m - p - below; ++i) F(0), B(1), F(1), B(0);
    for (int i = 0; i < below; ++i) B(1), F(1), B(0);
    for (int i = 0; i <= rank; ++i) B((i + 1) % 2);
    for (int i = rank + 1; i < 2 * (rank + 1); ++i) I((i + 1) % 2);
    for (int i = 0; i < below; ++i) W(), I(0);
    for (int i = 0; i <= rank; ++i) W();
  }
  return schedule;
}

}  // namespace lockstep
