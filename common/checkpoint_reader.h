#pragma once
// A checkpoint on the disk, put together again. The tensors of a parameter may lie in many pieces,
// in the files of many ranks; each says which elements of the whole parameter it holds. Whoever
// loads asks for its own elements and need not know who wrote them.

#include <deque>
#include <map>

#include "common/manifest.h"
#include "common/optim.h"
#include "common/safetensors.h"

namespace lockstep {

namespace saved {  // tensors are called step_state and master/<parameter>, m/..., v/...
inline const std::string kState = "step_state", kMaster = "master/", kM = "m/", kV = "v/";
}

// One checkpoint, opened: manifest, sizes and headers are checked, tensors are read when asked for.
class Checkpoint {
 public:
  explicit Checkpoint(std::filesystem::path path);
  Checkpoint(const Checkpoint&) = delete;  // it keeps pointers into its files

  const std::filesystem::path& path() const { return path_; }
  const Manifest& manifest() const { return manifest_; }
  // Into an optimizer of the same model, whatever its layout. All names, shapes and types are
  // compared before the first byte changes.
  void load(AdamW& optimizer) const;
  // The local shard, F32 on the CPU.
  Tensor parameter(const Parameter& p) const;

 private:
  struct Place {  // of one tensor: elements first, first+1, ... of a shard of the parameter
    Shard shard;
    int64_t first = 0, count = 0;
  };
  struct Piece {
    const SafetensorsFile* file;
    Place place;
  };
  std::vector<Piece> pieces(const std::string& name, const Parameter& p) const;
  static Place read_place(const SafetensorsFile& file, const std::string& name, const Parameter& p);
  void check(const std::string& name, const Owned& o) const;
  Tensor read_local(const std::string& name, const Parameter& p) const;
  Tensor read_whole(const std::string& name, const Parameter& p) const;
  Tensor read_state() const;

  std::filesystem::path path_;
  Manifest manifest_;
  std::deque<SafetensorsFile> files_;  // a deque keeps its elements where they are
  std::map<std::string, std::vector<const SafetensorsFile*>> holders_;  // tensor name -> files
};

// Waits for the device.
StepState on_host(const Tensor& state);

}  // namespace lockstep
