#pragma once
// Ranks tell each other in words. What one rank has found out, or that it has failed, all must know
// before they go on: a rank that gave up alone would leave the others waiting in their next
// collective, and they would blame the wait.
//
//   rank 0   write my files ─▶ "a.safetensors 120"  ┐           ┌▶ both texts
//   rank 1   write my files ─▶ disk is full         ┘ exchange  └▶ all: "on rank 1: disk is full"

#include <functional>
#include <string>
#include <vector>

#include "common/comm.h"

namespace lockstep {

// Runs `part` on every rank and returns everyone's answer. If it fails on one rank it fails on all,
// with that rank's sentence. world null: there is one rank.
std::vector<std::string> together(Communicator* world, const std::function<std::string()>& part);

}  // namespace lockstep
