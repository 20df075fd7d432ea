#include "common/huggingface.h"

#include <algorithm>
#include <cstring>
#include <nlohmann/json.hpp>
#include <set>

#include "common/json.h"

namespace lockstep {

using Json = nlohmann::json;
namespace fs = std::filesystem;

static const std::string kEmbedding = "model.embed_tokens.weight";
static const std::string kHead = "lm_head.weight";
static const std::string kWeights = "model.safetensors";
static const std::string kIndex = "model.safetensors.index.json";

// ---- config.json

namespace {
// Typed access to one JSON object. A key that is absent or null takes the fallback; a value of the
// wrong type is refused with the key and the value.
struct Fields {
  const Json& json;
  std::string source;

  bool has(const char* key) const { return json.contains(key) && !json[key].is_null(); }
  const Json& at(const char* key) const {
    require(has(key), source, " has no ", key);
    return json[key];
  }
  int64_t size(const char* key) const {
    const Json& value = at(key);
    require(value.is_number_integer(), source, ": ", key, " is ", value.dump(),
            "; a whole number was expected");
    return value.get<int64_t>();
  }
  int64_t size(const char* key, int64_t fallback) const { return has(key) ? size(key) : fallback; }
  double number(const char* key, double fallback) const {
    if (!has(key)) return fallback;
    require(json[key].is_number(), source, ": ", key, " is ", json[key].dump(),
            "; a number was expected");
    return json[key].get<double>();
  }
  bool flag(const char* key, bool fallback) const {
    if (!has(key)) return fallback;
    require(json[key].is_boolean(), source, ": ", key, " is ", json[key].dump(),
            "; true or false was expected");
    return json[key].get<bool>();
  }
  std::string word(const char* key, const char* fallback) const {
    if (!has(key)) return fallback;
    require(json[key].is_string(), source, ": ", key, " is ", json[key].dump(),
            "; text was expected");
    return json[key].get<std::string>();
  }
  Fields inside(const char* key) const {
    require(at(key).is_object(), source, ": ", key, " is ", at(key).dump(),
            "; an object {...} was expected");
    return {at(key), source + ": " + key};
  }
};
}  // namespace

// transformers 5 writes rope_parameters {rope_type, rope_theta}. Before, rope_theta stood at the
// top and rope_scaling {rope_type, or even older: type} said how to stretch it.
static double read_rope_theta(const Fields& config) {
  double theta = config.number("rope_theta", 10000);
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    if (!config.has(key)) continue;
    Fields rope = config.inside(key);
    std::string type = rope.word("rope_type", rope.word("type", "default").c_str());
    require(type == "default", rope.source, " asks for rotary embeddings of type \"", type,
            "\"; this program has only \"default\"");
    double part = rope.number("partial_rotary_factor", 1);
    require(part == 1, rope.source, " turns only a part (", part, ") of each head; this program ",
            "turns all of it");
    theta = rope.number("rope_theta", theta);
  }
  return theta;
}

static void refuse_what_we_lack(const Fields& config) {
  std::string type = config.word("model_type", "");
  require(type == "llama", config.source, " describes a model of type \"", type,
          "\"; this program reads \"llama\"");
  std::string activation = config.word("hidden_act", "silu");
  require(activation == "silu", config.source, ": hidden_act is \"", activation,
          "\"; this program has only \"silu\"");
  double dropout = config.number("attention_dropout", 0);
  require(dropout == 0, config.source, ": attention_dropout is ", dropout,
          "; this program has no dropout of attention weights, only 0 can be read");
  require(!config.has("quantization_config"), config.source,
          " describes quantised weights; this program reads floating-point ones");
}

ModelConfig read_config(const fs::path& dir) {
  const fs::path path = dir / "config.json";
  require(fs::is_directory(dir), dir.string(), " is not a directory with a Hugging Face model");
  const Json json = read_json(path);
  Fields fields{json, path.string()};
  refuse_what_we_lack(fields);

  ModelConfig c;
  c.layers = fields.size("num_hidden_layers");
  c.hidden = fields.size("hidden_size");
  c.heads = fields.size("num_attention_heads");
  c.kv_heads = fields.size("num_key_value_heads", c.heads);
  require(c.heads > 0, path.string(), ": num_attention_heads is ", c.heads);
  c.head_dim = fields.size("head_dim", c.hidden / c.heads);
  require(fields.has("head_dim") || c.hidden % c.heads == 0, path.string(), ": hidden_size ",
          c.hidden, " cannot be cut into ", c.heads, " heads, and head_dim is not given");
  c.ffn = fields.size("intermediate_size");
  c.vocab = fields.size("vocab_size");
  c.max_length = fields.size("max_position_embeddings", 0);
  c.rope_theta = read_rope_theta(fields);
  c.norm_epsilon = fields.number("rms_norm_eps", 1e-6);  // LlamaConfig's own default
  c.init_std = fields.number("initializer_range", 0.02);
  c.tied = fields.flag("tie_word_embeddings", false);
  c.attention_bias = fields.flag("attention_bias", false);
  c.mlp_bias = fields.flag("mlp_bias", false);
  try {
    c.validate();
  } catch (const Error& e) {
    throw Error(path.string() + ": " + e.what(), e.where);
  }
  return c;
}

static std::string config_json(const ModelConfig& c, DType weights) {
  nlohmann::ordered_json out = {
      {"architectures", {"LlamaForCausalLM"}},
      {"model_type", "llama"},
      {"torch_dtype", weights == DType::BF16 ? "bfloat16" : "float32"},
      {"num_hidden_layers", c.layers},
      {"hidden_size", c.hidden},
      {"num_attention_heads", c.heads},
      {"num_key_value_heads", c.kv_heads},
      {"head_dim", c.head_dim},
      {"intermediate_size", c.ffn},
      {"vocab_size", c.vocab},
      {"hidden_act", "silu"},
      {"rms_norm_eps", c.norm_epsilon},
      {"initializer_range", c.init_std},
      {"rope_theta", c.rope_theta},  // for transformers 4; version 5 reads rope_parameters
      {"rope_parameters", {{"rope_type", "default"}, {"rope_theta", c.rope_theta}}},
      {"tie_word_embeddings", c.tied},
      {"attention_bias", c.attention_bias},
      {"attention_dropout", 0.0},
      {"mlp_bias", c.mlp_bias},
  };
  if (c.max_length > 0) out["max_position_embeddings"] = c.max_length;
  return out.dump(2) + "\n";
}

// ---- Weights

WeightFiles::WeightFiles(const fs::path& dir) : dir_(dir) {
  require(fs::is_directory(dir), dir.string(), " is not a directory with a Hugging Face model");
  if (fs::exists(dir / kWeights)) {
    open_single();
  } else if (fs::exists(dir / kIndex)) {
    open_index(dir / kIndex);
  } else {
    fail(text(dir.string(), " holds neither ", kWeights, " nor ", kIndex));
  }
}

void WeightFiles::open_single() {
  const SafetensorsFile& file = files_.try_emplace(kWeights, dir_ / kWeights).first->second;
  for (const std::string& name : file.names()) file_of_[name] = kWeights;
}

// The index and the files must tell the same story: the index names every tensor of the files once,
// and the files hold what the index promises.
void WeightFiles::open_index(const fs::path& index) {
  const Json json = read_json(index);
  const Fields map = Fields{json, index.string()}.inside("weight_map");
  for (const auto& [name, where] : map.json.items()) {
    require(where.is_string(), index.string(), " puts tensor ", name, " into ", where.dump(),
            ", which is not the name of a file");
    std::string file = where.get<std::string>();
    require(!file.empty() && fs::path(file).filename() == file, index.string(), " puts tensor ",
            name, " into \"", file, "\": only files beside the index can be named");
    require(fs::exists(dir_ / file), "weight file ", (dir_ / file).string(),
            " is missing: ", index.string(), " says that it holds tensor ", name);
    files_.try_emplace(file, dir_ / file);
    file_of_[name] = file;
  }
  for (const auto& [name, file] : file_of_)
    require(files_.at(file).has(name), (dir_ / file).string(), " holds no tensor ", name,
            ", although ", index.string(), " says so");
  for (const auto& [file, content] : files_)
    for (const std::string& name : content.names())
      require(has(name) && file_of_[name] == file, "tensor ", name, " is in ",
              content.path().string(), ", but ", index.string(), " says ",
              has(name) ? "that it is in " + file_of_[name] : "nothing of it");
}

std::vector<std::string> WeightFiles::names() const {
  std::vector<std::string> out;
  for (const auto& [name, file] : file_of_) out.push_back(name);
  return out;
}

const SafetensorsFile& WeightFiles::file_with(const std::string& name) const {
  auto found = file_of_.find(name);
  require(found != file_of_.end(), "the weights in ", dir_.string(), " hold no tensor ", name);
  return files_.at(found->second);
}

const TensorInfo& WeightFiles::info(const std::string& name) const {
  return file_with(name).info(name);
}

Tensor WeightFiles::read(const std::string& name) const { return file_with(name).read(name); }

// ---- From files to parameters

// out[i] = whole[shard.whole_index(i)], in runs of neighbours.
template <class T>
static void cut(float* out, const T* whole, const Shard& shard, int64_t count) {
  const IndexMap map = shard.index_map();
  const int64_t run = shard.dim < 0 ? count : map.local_stride;
  for (int64_t i = 0; i < count; i += run) {
    const T* from = whole + map.whole(i);
    std::transform(from, from + run, out + i, [](T value) { return float(value); });
  }
}

Tensor read_parameter(const Parameter& p, const WeightFiles& files, bool tied) {
  const std::string name = tied && p.name == kHead ? kEmbedding : p.name;
  require(files.has(name), "the weights in ", files.directory().string(), " hold no tensor ", name,
          name == kHead ? ", and config.json does not tie it to the embedding" : "");
  const Shape& shape = files.info(name).shape;
  require(shape == p.shard.whole, "tensor ", name, " in ", files.directory().string(),
          " has shape ", shape, ", but the model needs ", p.shard.whole);
  const std::string& dtype = files.info(name).dtype;
  require(dtype == "F64" || dtype == "F32" || dtype == "F16" || dtype == "BF16", "tensor ", name,
          " in ", files.directory().string(), " holds ", dtype,
          "; weights must be F64, F32, F16 or BF16");

  Tensor whole = files.read(name);
  if (whole.dtype() == DType::F32 && p.shard.dim < 0) return whole;
  Tensor out = Tensor::empty(p.shard.local, DType::F32, Device::CPU, Category::Buffers);
  with_type(whole.dtype(), [&](auto zero) {
    using T = decltype(zero);
    cut(out.data<float>(), whole.data<T>(), p.shard, out.size());
  });
  return out;
}

void refuse_unused(const WeightFiles& files, const std::vector<std::string>& parameters,
                   bool tied) {
  const std::set<std::string> used(parameters.begin(), parameters.end());
  for (const std::string& name : files.names()) {
    if (used.contains(name) || (tied && name == kHead)) continue;
    if (name.ends_with("rotary_emb.inv_freq")) continue;
    fail(text("the weights in ", files.directory().string(), " hold tensor ", name,
              ", which the model of config.json has no place for"));
  }
  if (!tied || !files.has(kHead)) return;
  Tensor head = files.read(kHead), table = files.read(kEmbedding);
  require(head.bytes() == table.bytes() &&
              std::memcmp(head.raw(), table.raw(), size_t(head.bytes())) == 0,
          "config.json in ", files.directory().string(), " ties the head to the embedding, but ",
          kHead, " and ", kEmbedding, " differ");
}

void write_huggingface(const fs::path& dir, const ModelConfig& config,
                       const NamedTensors& weights) {
  config.validate();
  NamedTensors kept = weights;  // a tied head is the embedding under another name
  if (config.tied) std::erase_if(kept, [](const auto& w) { return w.first == kHead; });
  require(!kept.empty(), "a model without weights cannot be written to ", dir.string());
  fs::create_directories(dir);
  write_file(dir / "config.json", {config_json(config, kept.front().second.dtype())});
  write_safetensors(dir / kWeights, kept, {{"format", "pt"}});
}

}  // namespace lockstep
