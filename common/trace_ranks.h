#pragma once
// The traces of all ranks in one picture. Each rank records itself; when the steps are over, their
// recordings travel to rank 0, which writes one file: a process for each rank, on one time line.
//
//   rank 0   compute ██████████ ░░░░    while one rank waits, the picture shows for whom
//   rank 1   compute ██████████████

#include "common/comm.h"
#include "common/diagnose.h"

namespace lockstep {

// On rank 0 all ranks' recordings, elsewhere none.
std::vector<Recording> gather_recordings(Communicator& world, const Recording& mine);

// start_trace() and show_trace() for a job of several ranks (diagnose.h). All ranks call them, and
// rank 0 writes the file and says where its own time went.
std::unique_ptr<Trace> start_traces(Communicator& world, const std::string& path, bool profile,
                                    Device device, int64_t steps);
void show_traces(Communicator& world, const Recording& mine, const std::string& path, bool profile);

}  // namespace lockstep
