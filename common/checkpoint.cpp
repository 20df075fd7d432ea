#include "common/checkpoint.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <iostream>
#include <nlohmann/json.hpp>

#include "common/together.h"

namespace lockstep {

using Json = nlohmann::json;
namespace fs = std::filesystem;

// ---- Folders

static std::string folder_name(int64_t step) {
  char out[32];
  std::snprintf(out, sizeof out, "step_%08lld", static_cast<long long>(step));
  return out;
}

// "step_00000100" -> 100; -1 for every other name.
static int64_t step_of(const std::string& name) {
  if (!name.starts_with("step_") || name.size() > 23) return -1;
  std::string digits = name.substr(5);
  if (digits.empty() || digits.find_first_not_of("0123456789") != std::string::npos) return -1;
  return std::stoll(digits);
}

static std::map<int64_t, fs::path, std::greater<>> checkpoints_in(const fs::path& dir) {
  std::map<int64_t, fs::path, std::greater<>> newest_first;
  std::error_code none;  // a folder that is not there holds nothing
  for (const auto& entry : fs::directory_iterator(dir, none)) {
    int64_t step = step_of(entry.path().filename().string());
    if (step >= 0) newest_first[step] = entry.path();
  }
  return newest_first;
}

bool holds_checkpoints(const fs::path& dir) { return !checkpoints_in(dir).empty(); }

// Makes the names in a folder durable; not every file system can.
static void sync_folder(const fs::path& folder) {
  int fd = ::open(folder.empty() ? "." : folder.c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  if (fd < 0) return;
  ::fsync(fd);
  ::close(fd);
}

static void rename_folder(const fs::path& from, const fs::path& to) {
  std::error_code error;
  fs::rename(from, to, error);
  require(!error, from.string(), " cannot be renamed to ", to.string(), ": ", error.message());
  sync_folder(to.parent_path());
}

static void make_folder(const fs::path& folder) {
  std::error_code error;
  fs::create_directories(folder, error);
  require(!error, folder.string(), " cannot be created: ", error.message());
  sync_folder(folder.parent_path());
}

// What cannot be removed costs space, not the run.
static void remove_folder(const fs::path& folder) {
  std::error_code error;
  fs::remove_all(folder, error);
  if (error) std::cerr << folder.string() << " cannot be removed: " << error.message() << "\n";
}

// Renamed first: a folder that is half removed must not look like a checkpoint.
static void throw_away(const fs::path& folder, const SaveOptions& options) {
  fs::path trash = folder.string() + ".trash";
  rename_folder(folder, trash);
  if (options.after) options.after(trash);
  remove_folder(trash);
  if (options.after) options.after(trash);
}

static void remove_leftovers(const fs::path& dir) {
  std::vector<fs::path> leftovers;
  for (const auto& entry : fs::directory_iterator(dir)) {
    const fs::path extension = entry.path().extension();
    bool ours = step_of(entry.path().stem().string()) >= 0;
    if (ours && (extension == ".partial" || extension == ".trash"))
      leftovers.push_back(entry.path());
  }
  for (const fs::path& folder : leftovers) remove_folder(folder);
}

// ---- Saving

static void verify(const fs::path& folder) { verify_files(folder, Checkpoint(folder).manifest()); }

fs::path begin_checkpoint(const fs::path& dir, int64_t step) {
  make_folder(dir);
  remove_leftovers(dir);
  const fs::path folder = dir / folder_name(step), partial = folder.string() + ".partial";
  if (fs::exists(folder)) {
    bool damaged = false;
    try {
      verify(folder);
    } catch (const std::exception&) {
      damaged = true;
    }
    require(damaged, folder.string(), " is there already and complete: it is not replaced");
    throw_away(folder, {});
  }
  make_folder(partial);
  return partial;
}

static std::string place_of(const Owned& o) {
  const Shard& s = o.parameter->shard;
  return Json{{"whole", s.whole}, {"local", s.local}, {"dim", s.dim},
              {"first", s.first}, {"from", o.first},  {"count", o.master.size()}}
      .dump();
}

namespace {
// Collects tensors and writes a file whenever the next one would make it too large.
struct RankFiles {
  const fs::path& folder;
  int rank, ranks;
  const SaveOptions& options;
  std::vector<SavedFile> written = {};
  NamedTensors tensors = {};
  std::map<std::string, std::string> places = {};
  int64_t bytes = 0;

  void add(const std::string& name, const Tensor& tensor, const std::string& place) {
    if (bytes + tensor.bytes() > options.file_bytes) write();
    tensors.push_back({name, tensor});
    places[name] = place;
    bytes += tensor.bytes();
  }
  void write() {
    if (tensors.empty()) return;
    char name[64];
    std::snprintf(name, sizeof name, "rank_%d_of_%d-%05d.safetensors", rank, ranks,
                  int(written.size()) + 1);
    const fs::path path = folder / name;
    write_safetensors(path, tensors, places);
    written.push_back({name, int64_t(fs::file_size(path)), hash_of_file(path)});
    tensors.clear(), places.clear(), bytes = 0;
    if (options.after) options.after(path);
  }
};
}  // namespace

std::vector<SavedFile> write_pieces(const fs::path& partial, const AdamW& optimizer, int rank,
                                    int ranks, const SaveOptions& options) {
  RankFiles files{partial, rank, ranks, options};
  if (rank == 0) files.add(saved::kState, optimizer.state(), "{}");
  for (size_t i = 0; i < optimizer.owned().size(); ++i) {
    const Owned& o = optimizer.owned()[i];
    if (!o.counted) continue;  // another rank owns the same elements and writes them
    const std::string &name = o.parameter->name, place = place_of(o);
    files.add(saved::kMaster + name, o.master, place);
    files.add(saved::kM + name, optimizer.moments()[i].m, place);
    files.add(saved::kV + name, optimizer.moments()[i].v, place);
  }
  files.write();
  return files.written;
}

void complete_checkpoint(const fs::path& partial, const Manifest& manifest,
                         const SaveOptions& options) {
  write_manifest(partial, manifest);
  if (options.after) options.after(partial / "manifest.json");
  const fs::path dir = partial.parent_path(), folder = dir / partial.stem();
  rename_folder(partial, folder);
  if (options.after) options.after(folder);

  int kept = 0;
  for (const auto& [step, old] : checkpoints_in(dir))
    if (step <= manifest.step && ++kept > options.keep) throw_away(old, options);
}

// A rank's files as text, one to a line, and back.
static std::string to_text(const std::vector<SavedFile>& files) {
  std::string lines;
  for (const SavedFile& f : files) lines += text(f.name, " ", f.bytes, " ", f.hash, "\n");
  return lines;
}
static std::vector<SavedFile> files_in(const std::vector<std::string>& texts) {
  std::vector<SavedFile> files;
  for (const std::string& lines : texts) {
    std::istringstream in(lines);
    for (SavedFile f; in >> f.name >> f.bytes >> f.hash;) files.push_back(f);
  }
  return files;
}

void save_checkpoint(const fs::path& dir, const AdamW& optimizer, const ModelConfig& config,
                     const CheckpointSettings& settings, int64_t step, const SaveOptions& options,
                     Communicator* world) {
  require(options.keep >= 1, "keeping ", options.keep, " checkpoints was asked for; at least 1 is ",
          "needed");
  StepState state = on_host(optimizer.state());
  require(!state.stopped, "step ", step, " is not saved: its loss is ", state.loss,
          " and its gradient norm ", state.gradient_norm);
  const int rank = world ? world->rank() : 0, ranks = world ? world->size() : 1;
  auto all = [&](const std::function<std::string()>& part) { return together(world, part); };
  const fs::path partial =
      all([&] { return rank == 0 ? begin_checkpoint(dir, step).string() : ""; })[0];
  try {
    std::vector<SavedFile> files = files_in(
        all([&] { return to_text(write_pieces(partial, optimizer, rank, ranks, options)); }));
    all([&] {
      if (rank == 0) complete_checkpoint(partial, {step, ranks, config, settings, files}, options);
      return "";
    });
  } catch (...) {
    if (rank == 0) remove_folder(partial);  // a full disk gets its space back
    throw;
  }
}

// ---- Finding

fs::path latest_checkpoint(const fs::path& dir) {
  if (fs::exists(dir / "manifest.json")) {
    verify(dir);
    return dir;
  }
  require(fs::is_directory(dir), dir.string(), " is not a directory with checkpoints");
  const auto found = checkpoints_in(dir);
  for (const auto& [step, folder] : found) {
    try {
      Checkpoint checkpoint(folder);
      require(checkpoint.manifest().step == step, folder.string(), " holds step ",
              checkpoint.manifest().step);
      verify_files(folder, checkpoint.manifest());
      return folder;
    } catch (const std::exception& e) {
      std::cerr << "checkpoint " << folder.string() << " is passed over: " << e.what() << "\n";
    }
  }
  fail(text(dir.string(), " holds no complete checkpoint (", found.size(), " damaged)"));
}

// ---- Shorthands

ModelConfig checkpoint_config(const fs::path& path) { return read_manifest(path).config; }

CheckpointSettings checkpoint_settings(const fs::path& path) {
  return read_manifest(path).settings;
}

int64_t load_checkpoint(const fs::path& path, AdamW& optimizer) {
  Checkpoint checkpoint(path);
  checkpoint.load(optimizer);
  return checkpoint.manifest().step;
}

Tensor checkpoint_parameter(const fs::path& path, const Parameter& p) {
  return Checkpoint(path).parameter(p);
}

}  // namespace lockstep
