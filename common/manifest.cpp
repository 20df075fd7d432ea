#include "common/manifest.h"

#include <algorithm>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <fstream>
#include <limits>
#include <nlohmann/json.hpp>
#include <set>

#include "common/json.h"

namespace lockstep {

using Json = nlohmann::json;
namespace fs = std::filesystem;

static constexpr int64_t kVersion = 1;
static constexpr uint64_t kLargestManifest = 64 << 20;

// ---- Hash

uint64_t ContentHash::mix(uint64_t h, uint64_t word) {
  h = (h ^ word) * 0x100000001b3ull;
  return h ^ h >> 32;
}

static uint64_t word_of(std::string_view bytes) {  // at most 8 of them
  uint64_t word = 0;
  std::memcpy(&word, bytes.data(), bytes.size());
  return word;
}

void ContentHash::add(std::string_view bytes) {
  length_ += bytes.size();
  if (!rest_.empty()) {
    size_t missing = std::min(8 - rest_.size(), bytes.size());
    rest_ += bytes.substr(0, missing);
    bytes.remove_prefix(missing);
    if (rest_.size() < 8) return;
    hash_ = mix(hash_, word_of(rest_));
  }
  size_t whole = bytes.size() / 8 * 8;
  for (size_t i = 0; i < whole; i += 8) hash_ = mix(hash_, word_of(bytes.substr(i, 8)));
  rest_ = bytes.substr(whole);
}

uint64_t ContentHash::value() const {
  return mix(rest_.empty() ? hash_ : mix(hash_, word_of(rest_)), length_);
}

uint64_t hash_of_file(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  ContentHash hash;
  std::vector<char> buffer(1 << 20);
  while (in.read(buffer.data(), std::streamsize(buffer.size())), in.gcount() > 0)
    hash.add({buffer.data(), size_t(in.gcount())});
  require(in.eof(), path.string(), " cannot be read");
  return hash.value();
}

std::string hexadecimal(uint64_t value) {
  char out[17];
  std::snprintf(out, sizeof out, "%016llx", static_cast<unsigned long long>(value));
  return out;
}

// ---- Structs as JSON: each lists its fields once, for the writer and for the reader

template <class Config, class Visit>  // ModelConfig or const ModelConfig
static void fields_of_model(Config& c, Visit&& visit) {
  visit("layers", c.layers);
  visit("hidden", c.hidden);
  visit("heads", c.heads);
  visit("kv-heads", c.kv_heads);
  visit("head-dim", c.head_dim);
  visit("ffn", c.ffn);
  visit("vocab", c.vocab);
  visit("max-length", c.max_length);
  visit("rope-theta", c.rope_theta);
  visit("norm-epsilon", c.norm_epsilon);
  visit("init-std", c.init_std);
  visit("dropout", c.dropout);
  visit("tied", c.tied);
  visit("attention-bias", c.attention_bias);
  visit("mlp-bias", c.mlp_bias);
}

// The names are those of the command line, where it has one.
template <class Settings, class Visit>
static void fields_of_settings(Settings& s, Visit&& visit) {
  visit("seed", s.seed);
  visit("sequence", s.sequence);
  visit("micro-batch", s.micro_batch);
  visit("batch-tokens", s.batch_tokens);
  visit("dtype", s.compute);
  visit("grad-dtype", s.gradients);
  visit("learning-rate", s.update.schedule.peak);
  visit("floor", s.update.schedule.floor);
  visit("warmup", s.update.schedule.warmup);
  visit("steps", s.update.schedule.total);
  visit("beta1", s.update.beta1);
  visit("beta2", s.update.beta2);
  visit("epsilon", s.update.epsilon);
  visit("weight-decay", s.update.weight_decay);
  visit("clip", s.update.max_norm);
  visit("data", s.data);
}

static constexpr std::pair<DType, const char*> kTypes[] = {
    {DType::F32, "fp32"}, {DType::BF16, "bf16"}, {DType::F64, "fp64"}};

template <class T>
static Json to_json(const T& value) {
  return value;
}
static Json to_json(DType type) {
  for (const auto& [known, name] : kTypes)
    if (known == type) return name;
  fail(text("a model cannot be computed in ", name_of(type)));
}

static Json to_json(const ModelConfig& config) {
  Json out = Json::object();
  fields_of_model(config, [&](const char* name, const auto& v) { out[name] = to_json(v); });
  return out;
}
static Json to_json(const CheckpointSettings& settings) {
  Json out = Json::object();
  fields_of_settings(settings, [&](const char* name, const auto& v) { out[name] = to_json(v); });
  return out;
}

namespace {
// One object of the manifest, of which nothing is believed.
struct Reader {
  const Json& json;
  std::string source;

  const Json& at(const char* key) const {
    require(json.is_object() && json.contains(key), source, " has no \"", key, "\"");
    return json[key];
  }
  template <class T>
  void operator()(const char* key, T& out) const {
    const Json& value = at(key);
    require(fits(value, out), source, ": ", key, " is ", value.dump(), ", which it cannot be");
    if constexpr (std::is_same_v<T, DType>) {
      for (const auto& [type, name] : kTypes)
        if (value == name) out = type;
    } else {
      out = value.get<T>();
    }
  }

 private:
  static bool fits(const Json& v, bool) { return v.is_boolean(); }
  static bool fits(const Json& v, const std::string&) { return v.is_string(); }
  static bool fits(const Json& v, uint64_t) { return v.is_number_unsigned(); }
  static bool fits(const Json& v, int64_t) {
    return v.is_number_integer() &&
           (!v.is_number_unsigned() || v.get<uint64_t>() <= uint64_t(INT64_MAX));
  }
  static bool fits(const Json& v, double) { return v.is_number(); }
  static bool fits(const Json& v, float) {
    return v.is_number() && std::abs(v.get<double>()) <= double(std::numeric_limits<float>::max());
  }
  static bool fits(const Json& v, DType) {
    return std::any_of(std::begin(kTypes), std::end(kTypes),
                       [&](const auto& type) { return v == type.second; });
  }
};
}  // namespace

// ---- The manifest

// Unsigned, so that numbers from a hostile file may wrap around.
int64_t Manifest::next_sample() const {
  int64_t sequences = settings.batch_tokens / std::max<int64_t>(1, settings.sequence);
  return int64_t(uint64_t(step) * uint64_t(sequences));
}

static std::string checksum(const Json& without_it) {
  ContentHash hash;
  hash.add(without_it.dump());
  return hexadecimal(hash.value());
}

void write_manifest(const fs::path& folder, const Manifest& m) {
  Json out = {{"version", kVersion},
              {"step", m.step},
              {"next_sample", m.next_sample()},
              {"ranks", m.ranks},
              {"model", to_json(m.config)},
              {"settings", to_json(m.settings)},
              {"files", Json::array()}};
  for (const SavedFile& f : m.files)
    out["files"].push_back({{"name", f.name}, {"bytes", f.bytes}, {"hash", hexadecimal(f.hash)}});
  out["checksum"] = checksum(out);
  write_file(folder / "manifest.json", {out.dump(2), "\n"});
}

static SavedFile read_file(const Json& json, const fs::path& folder, const std::string& source) {
  SavedFile f;
  std::string hash;
  Reader read{json, source + ": files"};
  read("name", f.name);
  read("bytes", f.bytes);
  read("hash", hash);
  require(!f.name.empty() && fs::path(f.name).filename() == f.name, source, " names the file \"",
          f.name, "\": only files beside it can belong to a checkpoint");
  require(hash.size() == 16 && hash.find_first_not_of("0123456789abcdef") == std::string::npos,
          source, " gives ", f.name, " the hash \"", hash, "\"; 16 digits of 0-9a-f are valid");
  f.hash = std::stoull(hash, nullptr, 16);

  const fs::path path = folder / f.name;
  require(fs::is_regular_file(path), path.string(), " is missing");
  int64_t bytes = int64_t(fs::file_size(path));
  require(bytes == f.bytes, path.string(), " has ", bytes, " bytes, but ", source, " says ",
          f.bytes);
  return f;
}

static Json read_checked(const fs::path& path) {
  require(fs::is_regular_file(path), path.string(), " is missing: this is no complete checkpoint");
  require(fs::file_size(path) <= kLargestManifest, path.string(), " has ", fs::file_size(path),
          " bytes; a manifest has at most ", kLargestManifest);
  Json json = read_json(path);
  Reader read{json, path.string()};
  int64_t version = 0;
  read("version", version);
  require(version == kVersion, path.string(), " has version ", version, "; this program reads ",
          kVersion);
  std::string promised;
  read("checksum", promised);
  json.erase("checksum");
  require(promised == checksum(json), path.string(), " is damaged: it has the checksum ",
          checksum(json), " and says ", promised);
  return json;
}

Manifest read_manifest(const fs::path& folder) {
  const fs::path path = folder / "manifest.json";
  const std::string source = path.string();
  const Json json = read_checked(path);
  Reader read{json, source};
  Manifest m;
  int64_t ranks = 0, next_sample = 0;
  read("step", m.step);
  read("ranks", ranks);
  read("next_sample", next_sample);
  require(m.step >= 0, source, " says step ", m.step, "; steps count from 0");
  require(ranks >= 1 && ranks <= 1'000'000, source, " says that ", ranks, " ranks wrote it");
  m.ranks = int(ranks);
  fields_of_model(m.config, Reader{read.at("model"), source + ": model"});
  m.config.validate();
  fields_of_settings(m.settings, Reader{read.at("settings"), source + ": settings"});
  require(next_sample == m.next_sample(), source, " says that step ", m.step, " ended at sample ",
          next_sample, "; with its batch that is ", m.next_sample());

  const Json& files = read.at("files");
  require(files.is_array() && !files.empty(), source, " lists no files");
  std::set<std::string> names;
  for (const Json& file : files) {
    m.files.push_back(read_file(file, folder, source));
    require(names.insert(m.files.back().name).second, source, " lists ", m.files.back().name,
            " twice");
  }
  return m;
}

void verify_files(const fs::path& folder, const Manifest& manifest) {
  for (const SavedFile& f : manifest.files) {
    uint64_t hash = hash_of_file(folder / f.name);
    require(hash == f.hash, (folder / f.name).string(), " is damaged: its content has the hash ",
            hexadecimal(hash), ", the manifest says ", hexadecimal(f.hash));
  }
}

static void require_same(const fs::path& folder, const Json& saved, const Json& now) {
  for (const auto& [key, value] : saved.items())
    require(value == now[key], folder.string(), " was saved by a run with ", key, " ", value.dump(),
            ", this run has ", now[key].dump(), ": give the same flags, or start a new run");
}

void require_same_run(const fs::path& folder, const Manifest& saved, const ModelConfig& config,
                      const CheckpointSettings& settings, int ranks) {
  require_same(folder, to_json(saved.config), to_json(config));
  Json before = to_json(saved.settings);
  if (ranks != saved.ranks) before.erase("micro-batch");
  require_same(folder, before, to_json(settings));
}

}  // namespace lockstep
