#pragma once
// What tests of checkpoints share: a small model that is saved, and all its bytes.

#include <algorithm>
#include <cstring>

#include "common/checkpoint.h"
#include "tests/rig.h"
#include "tests/temporary.h"

namespace lockstep {

inline std::vector<Device> devices() {
  if (device::available()) return {Device::CPU, Device::CUDA};
  return {Device::CPU};
}

inline std::string bytes_of(const Tensor& t) {
  Tensor host = t.to(Device::CPU);
  device::synchronize();
  return {reinterpret_cast<const char*>(host.raw()), size_t(host.bytes())};
}

// Stands for all bytes of values, masters, moments and the step's state.
inline std::string everything(const Rig& rig) {
  ContentHash all;
  for (size_t i = 0; i < rig.optimizer->owned().size(); ++i) {
    const Owned& o = rig.optimizer->owned()[i];
    const AdamW::Moments& moments = rig.optimizer->moments()[i];
    for (const Tensor& t : {o.value, o.master, moments.m, moments.v}) all.add(bytes_of(t));
  }
  all.add(bytes_of(rig.optimizer->state()));
  return hexadecimal(all.value());
}

inline std::vector<std::string> names_in(const std::filesystem::path& folder) {
  std::vector<std::string> out;
  for (const auto& entry : std::filesystem::directory_iterator(folder))
    out.push_back(entry.path().filename());
  std::sort(out.begin(), out.end());
  return out;
}

// A model that has learnt a little, saved as step `step`.
struct Saved {
  Saved(const std::filesystem::path& dir, int64_t step, const SaveOptions& options = {})
      : dir(dir) {
    settings.sequence = 8, settings.micro_batch = 2, settings.batch_tokens = 32;
    settings.data = "text";
    rig.step({random_batch(2, 8, rig.settings.config.vocab, 3)});
    save(step, options);
    path = latest_checkpoint(dir);
  }
  void save(int64_t step, const SaveOptions& options = {}) {
    save_checkpoint(dir, *rig.optimizer, rig.settings.config, settings, step, options);
  }

  std::filesystem::path dir, path;
  Rig rig{{}};
  CheckpointSettings settings;
};

}  // namespace lockstep
