#include "common/text_files.h"

#include <glob.h>

#include <algorithm>
#include <cstdio>
#include <fstream>
#include <memory>
#include <sstream>

#include "common/check.h"
#include "common/files.h"

namespace lockstep {

namespace fs = std::filesystem;

static std::string shell_quoted(const std::string& word) {
  std::string out = "'";
  for (char c : word) out += c == '\'' ? std::string("'\\''") : std::string(1, c);
  return out + "'";
}

static std::string output_of(const std::string& command) {
  std::unique_ptr<FILE, int (*)(FILE*)> pipe(popen(command.c_str(), "r"), pclose);
  require(pipe != nullptr, "no shell could be started for: ", command);
  std::string out;
  char buffer[4096];
  while (size_t n = fread(buffer, 1, sizeof buffer, pipe.get())) out.append(buffer, n);
  return out;
}

// gcc and clang list the directories that they search for <...>, one a line behind a blank, when
// they preprocess an empty file verbosely.
fs::path standard_library_directory(const std::string& compiler) {
  std::string report =
      output_of("LC_ALL=C " + shell_quoted(compiler) + " -E -x c++ -v /dev/null 2>&1 >/dev/null");
  std::istringstream lines(report);
  for (std::string line; std::getline(lines, line);) {
    if (!line.starts_with(" /")) continue;
    fs::path directory = line.substr(1);
    std::error_code missing;
    if (fs::is_regular_file(directory / "vector", missing)) return fs::canonical(directory);
  }
  fail(text("the default text is the C++ standard library's headers, but ", compiler,
            ", which built this program, does not say where they are: name a text with --data"));
}

static std::vector<fs::path> below(const fs::path& directory) {
  std::vector<fs::path> out;
  const auto options = fs::directory_options::skip_permission_denied;
  for (fs::recursive_directory_iterator it(directory, options), end; it != end; ++it) {
    std::error_code broken;  // a link to nowhere is no file, and no reason to stop
    if (it->is_regular_file(broken)) out.push_back(it->path());
  }
  return out;
}

static std::vector<fs::path> matches(const std::string& pattern) {
  glob_t found{};
  std::vector<fs::path> out;
  if (glob(pattern.c_str(), 0, nullptr, &found) == 0)
    for (size_t i = 0; i < found.gl_pathc; ++i)
      if (fs::is_regular_file(found.gl_pathv[i])) out.push_back(found.gl_pathv[i]);
  globfree(&found);
  return out;
}

std::vector<fs::path> list_files(const fs::path& what) {
  std::vector<fs::path> out;
  std::error_code missing;
  require(fs::status(what, missing).type() != fs::file_type::none, what.string(),
          " cannot be read: ", missing.message());
  if (fs::is_directory(what, missing)) {
    out = below(what);
    require(!out.empty(), what.string(), " is a directory without a single readable file");
  } else if (fs::exists(what, missing)) {
    out = {what};
  } else {
    out = matches(what.string());
    require(!out.empty(), "there is no file or directory ", what.string(),
            ", and no file matches it as a pattern");
  }
  std::sort(out.begin(), out.end(),
            [](const fs::path& a, const fs::path& b) { return a.string() < b.string(); });
  return out;
}

std::vector<fs::path> without_target_specific(std::vector<fs::path> files,
                                              const fs::path& library) {
  auto specific = [&](const fs::path& file) {
    const fs::path top = library / *file.lexically_relative(library).begin();
    return fs::is_regular_file(top / "bits" / "c++config.h");
  };
  std::erase_if(files, specific);
  return files;
}

bool is_readable(const fs::path& path) { return bool(std::ifstream(path)); }

std::string read_text(const fs::path& path) {
  std::ifstream in = open_to_read(path);
  std::string content(fs::file_size(path), '\0');
  in.read(content.data(), std::streamsize(content.size()));
  content.resize(size_t(in.gcount()));
  return content;
}

}  // namespace lockstep
