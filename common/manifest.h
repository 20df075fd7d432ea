#pragma once
// The page of contents of a checkpoint, written last: what run it belongs to, and which files it
// has with their sizes and hashes. A folder without a manifest that agrees with every file beside
// it is not a checkpoint.
//
//     DIR/step_00000100/manifest.json
//     {"version": 1, "step": 100, "next_sample": 1600, "ranks": 1,
//      "model": {"layers": 4, ...}, "settings": {"seed": 1, "sequence": 128, ...},
//      "files": [{"name": "rank_0_of_1-00001.safetensors", "bytes": 12345, "hash": "0123..."}],
//      "checksum": "of everything above"}

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

#include "common/dtype.h"
#include "common/model_config.h"
#include "common/step_state.h"

namespace lockstep {

// What, beside the model, has to be the same when a run goes on: every number of the next step
// depends on it. (Another number of ranks may go on with another micro-batch: the global batch and
// its samples stay the same, and only the order of the sums differs, as it does anyway.)
struct CheckpointSettings {
  uint64_t seed = 1;
  int64_t sequence = 0, micro_batch = 0, batch_tokens = 0;
  DType compute = DType::F32, gradients = DType::F32;
  UpdateRule update;
  std::string data;  // which text: its size and a fingerprint, not where it lies
};

struct SavedFile {
  std::string name;
  int64_t bytes = 0;
  uint64_t hash = 0;
};

struct Manifest {
  int64_t step = 0;
  int ranks = 1;
  ModelConfig config;
  CheckpointSettings settings;
  std::vector<SavedFile> files;
  // Samples are numbered over the whole run (data.h): the next step begins with this one.
  int64_t next_sample() const;
};

// h = (h ^ word) * prime, h ^= h >> 32, over words of 8 bytes (the last one padded with zeros) and
// then over the length. FNV-1a (Fowler, Noll and Vo, 1991) over words instead of bytes, so that it
// keeps up with a disk, with one shift so that high bits reach low ones. Each step can be undone,
// so damage within one word always changes the result. It finds accidents, not forgers.
class ContentHash {
 public:
  void add(std::string_view bytes);
  uint64_t value() const;

 private:
  static uint64_t mix(uint64_t h, uint64_t word);
  uint64_t hash_ = 0xcbf29ce484222325ull, length_ = 0;
  std::string rest_;  // fewer than 8 bytes
};
std::string hexadecimal(uint64_t value);  // 16 digits
uint64_t hash_of_file(const std::filesystem::path& path);

void write_manifest(const std::filesystem::path& folder, const Manifest& manifest);
// Checks the form of everything in it, and that each file is there with its size.
Manifest read_manifest(const std::filesystem::path& folder);
// Reads every file and compares its hash.
void verify_files(const std::filesystem::path& folder, const Manifest& manifest);

// One sentence that names the first setting in which the two runs differ, and both its values.
void require_same_run(const std::filesystem::path& folder, const Manifest& saved,
                      const ModelConfig& config, const CheckpointSettings& settings, int ranks = 1);

}  // namespace lockstep
