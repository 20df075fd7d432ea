#include "common/json.h"

#include <fcntl.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <fstream>
#include <iterator>
#include <nlohmann/json.hpp>
#include <set>

#include "common/check.h"
#include "common/files.h"

namespace lockstep {

using Json = nlohmann::json;

// No format that we read nests deeper than config.json does.
static constexpr int kDeepest = 16;

Json parse_json(std::string_view content, const std::string& source) {
  std::vector<std::set<std::string>> keys;  // seen so far, of every object that is still open
  auto watch = [&](int depth, Json::parse_event_t event, Json& parsed) {
    using Event = Json::parse_event_t;
    require(depth <= kDeepest, source, " nests JSON deeper than ", kDeepest, " levels");
    if (event == Event::object_start) keys.emplace_back();
    if (event == Event::object_end) keys.pop_back();
    if (event == Event::key) {
      std::string key = parsed.get<std::string>();
      require(keys.back().insert(key).second, source, " names \"", key, "\" twice");
    }
    return true;
  };
  try {
    return Json::parse(content.begin(), content.end(), watch);
  } catch (const Json::exception& e) {
    fail(text(source, " is not JSON: ", e.what()));
  }
}

Json read_json(const std::filesystem::path& path) {
  std::ifstream in = open_to_read(path);
  std::string content((std::istreambuf_iterator<char>(in)), std::istreambuf_iterator<char>());
  Json json = parse_json(content, path.string());
  require(json.is_object(), path.string(), " is not a JSON object ({...})");
  return json;
}

namespace {
struct Descriptor {  // closes what it opened
  explicit Descriptor(int fd) : fd(fd) {}
  ~Descriptor() {
    if (fd >= 0) ::close(fd);
  }
  Descriptor(const Descriptor&) = delete;
  int fd;
};
}  // namespace

static void write_all(int fd, std::string_view bytes, const std::string& path) {
  while (!bytes.empty()) {
    ssize_t n = ::write(fd, bytes.data(), bytes.size());
    require(n > 0 || errno == EINTR, path, " cannot be written: ", std::strerror(errno));
    if (n > 0) bytes.remove_prefix(size_t(n));
  }
}

static void write_durably(const std::string& path, const std::vector<std::string_view>& pieces) {
  Descriptor out(::open(path.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_CLOEXEC, 0666));
  require(out.fd >= 0, path, " cannot be written: ", std::strerror(errno));
  for (std::string_view piece : pieces) write_all(out.fd, piece, path);
  // Without this the new name could reach the disk before the bytes that it names.
  require(::fsync(out.fd) == 0, path, " cannot be written: ", std::strerror(errno));
}

void write_file(const std::filesystem::path& path, const std::vector<std::string_view>& pieces) {
  const std::string temporary = path.string() + ".tmp";
  try {
    write_durably(temporary, pieces);
    require(::rename(temporary.c_str(), path.c_str()) == 0, path.string(),
            " cannot be replaced: ", std::strerror(errno));
  } catch (...) {
    ::unlink(temporary.c_str());
    throw;
  }
  std::filesystem::path folder = path.has_parent_path() ? path.parent_path() : ".";
  Descriptor parent(::open(folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC));
  if (parent.fd >= 0) ::fsync(parent.fd);  // the name itself; not every file system can
}

}  // namespace lockstep
