#pragma once
// Where a trained model comes from: a checkpoint of a run, or a Hugging Face directory. Both give
// one parameter at a time, so that the whole model is never in memory twice.

#include <filesystem>
#include <functional>
#include <string>
#include <vector>

#include "common/model.h"

namespace lockstep {

struct Source {
  ModelConfig config;
  std::string where;
  std::vector<int32_t> ends;                      // tokens that end a text
  std::function<Tensor(const Parameter&)> read;   // F32, on the CPU
  std::function<void(const Stage&)> check_names;  // refuses files with more than the model takes
};

Source open_hugging_face(const std::filesystem::path& dir);
// The newest checkpoint of a run, or the one that `dir` is.
Source open_checkpoint(const std::filesystem::path& dir);

// Gives the model its weights, and no memory for gradients or an optimizer.
void load_weights(Stage& model, const Source& source);

}  // namespace lockstep
