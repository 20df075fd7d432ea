#pragma once
// Named tensors in a file: the safetensors format of Hugging Face.
//
//   8 bytes   N, the length of the header (little-endian)
//   N bytes   JSON: {"name": {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...,
//             "__metadata__": {"key": "value"}}, padded with spaces
//   the rest  the elements, row-major; offsets count from here
//
// A file may come from anyone, so nothing in it is believed: every number is checked against the
// size of the file before memory is asked for or a byte is read, and the spans must cover the data
// exactly, without gap or overlap. Format: https://github.com/huggingface/safetensors, "Format".

#include <filesystem>
#include <map>
#include <string>
#include <utility>
#include <vector>

#include "common/tensor.h"

namespace lockstep {

struct TensorInfo {
  std::string dtype;  // as the file says: the format has more types than we read
  Shape shape;
  int64_t begin = 0, end = 0;  // bytes, from the start of the data
};

using NamedTensors = std::vector<std::pair<std::string, Tensor>>;

class SafetensorsFile {
 public:
  explicit SafetensorsFile(std::filesystem::path path);  // reads and checks the header

  const std::filesystem::path& path() const { return path_; }
  std::vector<std::string> names() const;
  bool has(const std::string& name) const { return tensors_.contains(name); }
  const TensorInfo& info(const std::string& name) const;
  const std::map<std::string, std::string>& metadata() const { return metadata_; }

  // On the CPU, in the file's type; F16, which we do not compute in, becomes F32 (exactly). Opens
  // the file anew each time, so ranks that are threads may read through one object.
  Tensor read(const std::string& name, Category category = Category::Buffers) const;

 private:
  void parse_header(std::string_view header, int64_t data_bytes);
  void check_spans(int64_t data_bytes) const;
  std::string where(const std::string& name) const;  // "tensor x of file y"

  std::filesystem::path path_;
  std::map<std::string, TensorInfo> tensors_;
  std::map<std::string, std::string> metadata_;
  int64_t data_start_ = 0;
};

// Writes the file under another name first and renames it when it is complete. Tensors may live on
// any device.
void write_safetensors(const std::filesystem::path& path, const NamedTensors& tensors,
                       const std::map<std::string, std::string>& metadata = {});

}  // namespace lockstep
