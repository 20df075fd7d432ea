#pragma once
// A run that can be killed at any moment and goes on bit by bit as if nothing had happened.
//
//     DIR/step_00000100.partial/            while it is written
//     DIR/step_00000100/                    what it becomes, in one rename
//       rank_0_of_1-00001.safetensors       master/<parameter>, m/<parameter>, v/<parameter>,
//       rank_0_of_1-00002.safetensors       step_state; cut at a size limit
//       manifest.json                       written last: settings, sizes and hashes of the files
//     DIR/step_00000050.trash/              an old one on its way out
//
// The order makes it safe: every file reaches the disk (fsync) before the manifest that names it,
// the manifest before the folder gets its name, and only then an older checkpoint goes. A kill
// leaves a .partial or .trash folder, which nobody loads and the next save removes.
//
// What has to be kept? The fp32 masters (16-bit weights follow from them, not the other way), both
// moments, AdamW's count of updates (bias correction and learning rate), and where the data stood.
// No generator state: random numbers and the order of the data are functions of the seed.
//
// Each rank writes what it owns. Every tensor comes with its place in the whole parameter, so that
// a job with another layout can put the pieces together again.
//
//     rank 0   make .partial │ write files │ manifest of everyone's files, rename
//     rank 1                 │ write files │
//                            └──────┬──────┴── all agree that nothing has failed (together.h)

#include <functional>

#include "common/checkpoint_reader.h"
#include "common/comm.h"

namespace lockstep {

struct SaveOptions {
  int64_t file_bytes = int64_t(4) << 30;  // a file ends before the tensor that would exceed this
  int keep = 2;                           // newest checkpoints that stay
  // Called after each change on the disk (a file, the rename, a removal), with what changed. Tests
  // end the program in it.
  std::function<void(const std::filesystem::path&)> after = {};
};

// Waits for the device. Refuses to save a run whose loss was not finite: it could never go on.
// world: of a job of several ranks, which all call it and see the same directory.
void save_checkpoint(const std::filesystem::path& dir, const AdamW& optimizer,
                     const ModelConfig& config, const CheckpointSettings& settings, int64_t step,
                     const SaveOptions& options = {}, Communicator* world = nullptr);

// Its parts: rank 0 begins, each rank writes its files, and when all have, rank 0 completes it with
// the list of everyone's files.
std::filesystem::path begin_checkpoint(const std::filesystem::path& dir, int64_t step);
std::vector<SavedFile> write_pieces(const std::filesystem::path& partial, const AdamW& optimizer,
                                    int rank, int ranks, const SaveOptions& options);
void complete_checkpoint(const std::filesystem::path& partial, const Manifest& manifest,
                         const SaveOptions& options);

// The newest complete and undamaged checkpoint in `dir`, every byte of it checked; `dir` may also
// be one checkpoint. Damaged ones are passed over with a line on stderr. Throws if none is left.
std::filesystem::path latest_checkpoint(const std::filesystem::path& dir);
// Does `dir` hold anything that is named like a checkpoint?
bool holds_checkpoints(const std::filesystem::path& dir);

// Shorthands, each of which opens the checkpoint anew.
ModelConfig checkpoint_config(const std::filesystem::path& path);
CheckpointSettings checkpoint_settings(const std::filesystem::path& path);
int64_t load_checkpoint(const std::filesystem::path& path, AdamW& optimizer);  // its step
Tensor checkpoint_parameter(const std::filesystem::path& path, const Parameter& p);

}  // namespace lockstep
