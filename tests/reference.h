#pragma once
// Directories with a model in Hugging Face's format and what their library computes with it
// (tests/reference/README.md): logits, loss, every gradient, ten training steps.
// LOCKSTEP_REFERENCE adds others, separated by ':'.

#include <cstdlib>
#include <fstream>
#include <nlohmann/json.hpp>
#include <sstream>

#include "common/huggingface.h"
#include "tests/rig.h"

namespace lockstep {

inline std::vector<std::string> reference_directories() {
  std::vector<std::string> directories = {LOCKSTEP_SOURCE_DIR "/tests/reference/tiny_llama",
                                          LOCKSTEP_SOURCE_DIR "/tests/reference/tiny_llama_tied"};
  if (const char* more = std::getenv("LOCKSTEP_REFERENCE")) {
    std::istringstream list(more);
    for (std::string directory; std::getline(list, directory, ':');)
      directories.push_back(directory);
  }
  return directories;
}

inline std::vector<Device> devices_here() {
  std::vector<Device> devices = {Device::CPU};
  if (device::available()) devices.push_back(Device::CUDA);
  return devices;
}

class ReferenceOutputs {
 public:
  explicit ReferenceOutputs(const std::string& directory)
      : directory_(directory),
        config_(read_config(directory)),
        values_(std::filesystem::path(directory) / "reference.safetensors") {
    std::ifstream file(std::filesystem::path(directory) / "reference.json");
    settings_ = nlohmann::json::parse(file);
  }

  const ModelConfig& config() const { return config_; }
  // How their ten steps update.
  UpdateRule rule() const {
    float lr = settings_.at("lr");
    return {.schedule = {.peak = lr, .floor = 1, .warmup = 0, .total = 0},
            .beta1 = settings_.at("betas")[0],
            .beta2 = settings_.at("betas")[1],
            .epsilon = settings_.at("eps"),
            .weight_decay = settings_.at("weight_decay_matrices"),
            .max_norm = settings_.at("clip")};
  }
  void load_weights(const std::vector<Owned>& owned) const {
    WeightFiles files(directory_);
    for (const Owned& o : owned) assign(o, read_parameter(*o.parameter, files, config_.tied));
  }
  int64_t sequences() const { return values_.read("input_ids").dim(0); }  // of their batch
  // A rank's share of it.
  MicroBatch batch(Device device, Cut rank = {}) const {
    Tensor ids = values_.read("input_ids");
    Range part = share(ids.dim(0), rank);
    auto rows = [&](const char* name) {
      return values_.read(name).rows(part.first, part.count).values<int32_t>();
    };
    return micro_batch(rows("input_ids"), rows("labels"), part.count, device, part.first);
  }
  std::vector<double> expected(const std::string& name) const {
    return doubles(values_.read(name));
  }

 private:
  std::string directory_;
  ModelConfig config_;
  SafetensorsFile values_;
  nlohmann::json settings_;
};

}  // namespace lockstep
