#pragma once
// Models as Hugging Face keeps them: a directory with config.json and model.safetensors, or with
// several weight files and model.safetensors.index.json, which says where each tensor is. Our
// parameters carry the same names, so nothing is renamed, fused or transposed on the way.
//
//   ModelConfig config = read_config(dir);
//   WeightFiles files(dir);
//   refuse_unused(files, names of all parameters, config.tied);
//   Tensor mine = read_parameter(p, files, config.tied);      // this rank's shard, for every p
//
// Only Llama models that we compute exactly are let in: what config.json asks for and we lack
// (other rotary embeddings, other activations, dropout of attention weights) is refused, never
// ignored.

#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "common/model_config.h"
#include "common/parameter.h"
#include "common/safetensors.h"

namespace lockstep {

ModelConfig read_config(const std::filesystem::path& dir);

class WeightFiles {
 public:
  explicit WeightFiles(const std::filesystem::path& dir);  // checks all files, reads no tensor yet

  std::vector<std::string> names() const;
  bool has(const std::string& name) const { return file_of_.contains(name); }
  const TensorInfo& info(const std::string& name) const;
  Tensor read(const std::string& name) const;  // on the CPU
  const std::filesystem::path& directory() const { return dir_; }

 private:
  void open_single();
  void open_index(const std::filesystem::path& index);
  const SafetensorsFile& file_with(const std::string& name) const;

  std::filesystem::path dir_;
  std::map<std::string, SafetensorsFile> files_;  // by file name
  std::map<std::string, std::string> file_of_;    // tensor name -> file name
};

// The elements of p that this rank holds, in fp32 on the CPU. Only the whole shape, p.shard.whole,
// has to be in the file: the same file serves every layout. The head of a tied model is the
// embedding's table, whether or not the file repeats it.
Tensor read_parameter(const Parameter& p, const WeightFiles& files, bool tied);

// Throws if a file holds a tensor that no parameter of the (whole) model takes: the model would run
// and would not be the one in the files. A tied head and the rotary frequencies that older versions
// stored may be there.
void refuse_unused(const WeightFiles& files, const std::vector<std::string>& parameters, bool tied);

// Writes config.json and model.safetensors; transformers' from_pretrained() reads the result.
// Dropout is not written: Hugging Face's Llama has none.
void write_huggingface(const std::filesystem::path& dir, const ModelConfig& config,
                       const NamedTensors& weights);

}  // namespace lockstep
