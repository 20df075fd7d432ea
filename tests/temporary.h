#pragma once
// For tests of files: a folder that goes away with the test, and what a refused file was refused
// with.

#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <string>
#include <vector>

#include "common/check.h"

namespace lockstep {

class TemporaryFolder {
 public:
  TemporaryFolder() {
    static std::atomic<int> made = 0;  // tests of one program may hold several
    path_ =
        std::filesystem::path(::testing::TempDir()) / text("lockstep_test_", getpid(), "_", made++);
    std::filesystem::create_directories(path_);
  }
  ~TemporaryFolder() {
    std::error_code ignored;
    std::filesystem::remove_all(path_, ignored);
  }
  TemporaryFolder(const TemporaryFolder&) = delete;

  std::filesystem::path operator/(const std::string& name) const { return path_ / name; }
  const std::filesystem::path& path() const { return path_; }

  std::filesystem::path write(const std::string& name, const std::string& content) const {
    std::filesystem::path file = path_ / name;
    std::filesystem::create_directories(file.parent_path());
    std::ofstream(file, std::ios::binary) << content;
    return file;
  }

 private:
  std::filesystem::path path_;
};

inline std::string content_of(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>()};
}

// action() must throw an Error whose sentence holds every one of these parts.
inline void expect_refusal(const std::function<void()>& action,
                           const std::vector<std::string>& parts) {
  try {
    action();
  } catch (const Error& e) {
    for (const std::string& part : parts)
      EXPECT_NE(std::string(e.what()).find(part), std::string::npos)
          << "\"" << e.what() << "\" does not say \"" << part << "\"";
    return;
  }
  ADD_FAILURE() << "nothing was refused; expected a sentence with \"" << parts.front() << "\"";
}

}  // namespace lockstep
