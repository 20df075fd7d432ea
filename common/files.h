#pragma once
// Opening a file that a user named.

#include <filesystem>
#include <fstream>

#include "common/check.h"

namespace lockstep {

// Looks before it opens: opening a pipe would wait for somebody to write into it.
inline std::ifstream open_to_read(const std::filesystem::path& path) {
  std::error_code missing;
  std::ifstream in;
  if (std::filesystem::is_regular_file(path, missing)) in.open(path, std::ios::binary);
  require(in.is_open(), path.string(), " cannot be read");
  return in;
}

}  // namespace lockstep
