// Model directories of Hugging Face: configurations, weight files, shards of them, and export.

#include "common/huggingface.h"

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>
#include <numeric>

#include "common/parts.h"
#include "tests/temporary.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;

const fs::path kReference = fs::path(LOCKSTEP_SOURCE_DIR) / "tests/reference";

Json small_config() {
  return {{"model_type", "llama"},    {"num_hidden_layers", 2},  {"hidden_size", 32},
          {"num_attention_heads", 4}, {"intermediate_size", 48}, {"vocab_size", 64},
          {"hidden_act", "silu"}};
}

ModelConfig read(const Json& json) {
  TemporaryFolder folder;
  folder.write("config.json", json.dump());
  return read_config(folder.path());
}

ModelConfig read_with(const char* key, Json value) {
  Json json = small_config();
  json[key] = std::move(value);
  return read(json);
}

Parameter parameter(const std::string& name, Shard shard) {
  Parameter p;
  p.name = name;
  p.shard = std::move(shard);
  return p;
}

std::vector<float> counting(int64_t n) {
  std::vector<float> out(static_cast<size_t>(n));
  std::iota(out.begin(), out.end(), 0.0f);
  return out;
}

NamedTensors two_tensors() {
  return {{"model.embed_tokens.weight", Tensor::from<float>(counting(24), {6, 4})},
          {"model.norm.weight", Tensor::from<float>({1, 2, 3, 4}, {4})}};
}

// Two weight files and an index over them.
void write_sharded(const TemporaryFolder& folder) {
  NamedTensors all = two_tensors();
  write_safetensors(folder / "a.safetensors", {all[0]});
  write_safetensors(folder / "b.safetensors", {all[1]});
  folder.write(
      "model.safetensors.index.json",
      Json{{"weight_map", {{all[0].first, "a.safetensors"}, {all[1].first, "b.safetensors"}}}}
          .dump());
}

// ---- config.json

TEST(HuggingFace, ReadsTheNewerConfiguration) {
  ModelConfig c = read_config(kReference / "tiny_llama");
  EXPECT_EQ(c.layers, 2);
  EXPECT_EQ(c.hidden, 32);
  EXPECT_EQ(c.heads, 4);
  EXPECT_EQ(c.kv_heads, 2);
  EXPECT_EQ(c.head_dim, 8);
  EXPECT_EQ(c.ffn, 48);
  EXPECT_EQ(c.vocab, 64);
  EXPECT_EQ(c.max_length, 64);
  EXPECT_EQ(c.rope_theta, 10000);
  EXPECT_EQ(c.norm_epsilon, 1e-5);
  EXPECT_EQ(c.init_std, 0.08);
  EXPECT_FALSE(c.tied || c.attention_bias || c.mlp_bias);
}

TEST(HuggingFace, ReadsTheOlderConfiguration) {
  ModelConfig c = read_config(kReference / "tiny_llama_tied");
  EXPECT_EQ(c.head_dim, 8);  // hidden / heads: the file does not say
  EXPECT_EQ(c.rope_theta, 5000);
  EXPECT_TRUE(c.tied && c.attention_bias && c.mlp_bias);
  EXPECT_EQ(read_with("head_dim", nullptr).head_dim, 8);
  EXPECT_EQ(read_with("head_dim", 16).head_dim, 16);
  EXPECT_EQ(read_with("num_key_value_heads", nullptr).kv_heads, 4);
  EXPECT_EQ(read_with("rope_scaling", {{"type", "default"}}).rope_theta, 10000);
}

TEST(HuggingFace, RopeParametersWinOverTheOlderKey) {
  Json json = small_config();
  json["rope_theta"] = 7;
  json["rope_parameters"] = {{"rope_type", "default"}, {"rope_theta", 500000.0}};
  EXPECT_EQ(read(json).rope_theta, 500000);
}

TEST(HuggingFace, RefusesUnknownRopeTypesByName) {
  expect_refusal(
      [] {
        read_with("rope_parameters", {{"rope_type", "llama3"}, {"factor", 8.0}});
      },
      {"config.json: rope_parameters", "llama3", "default"});
  expect_refusal([] { read_with("rope_scaling", {{"rope_type", "yarn"}}); }, {"yarn"});
  expect_refusal([] { read_with("rope_scaling", {{"type", "linear"}}); }, {"linear"});
  expect_refusal([] { read_with("rope_scaling", 2.0); }, {"rope_scaling is 2.0", "object"});
  expect_refusal(
      [] {
        read_with("rope_parameters", {{"partial_rotary_factor", 0.5}});
      },
      {"only a part"});
}

TEST(HuggingFace, RefusesModelsItDoesNotComputeExactly) {
  expect_refusal([] { read_with("model_type", "mistral"); }, {"mistral", "llama"});
  expect_refusal([] { read_with("model_type", nullptr); }, {"type \"\""});
  expect_refusal([] { read_with("hidden_act", "gelu"); }, {"gelu", "silu"});
  expect_refusal([] { read_with("attention_dropout", 0.1); }, {"attention_dropout", "0.1"});
  expect_refusal([] { read_with("quantization_config", Json::object()); }, {"quantised"});
}

TEST(HuggingFace, RefusesBrokenConfigurations) {
  TemporaryFolder folder;
  expect_refusal([&] { read_config(folder / "absent"); }, {"absent", "not a directory"});
  expect_refusal([&] { read_config(folder.path()); }, {"config.json", "cannot be read"});
  folder.write("config.json", "{\"model_type\": \"llama\",}");
  expect_refusal([&] { read_config(folder.path()); }, {"config.json", "not JSON"});
  folder.write("config.json", "[1]");
  expect_refusal([&] { read_config(folder.path()); }, {"not a JSON object"});
  expect_refusal([] { read_with("hidden_size", "32"); }, {"hidden_size is \"32\""});
  expect_refusal([] { read_with("hidden_size", 32.5); }, {"hidden_size is 32.5"});
  expect_refusal([] { read_with("hidden_size", nullptr); }, {"has no hidden_size"});
  expect_refusal([] { read_with("tie_word_embeddings", 1); }, {"tie_word_embeddings is 1"});
  expect_refusal([] { read_with("hidden_size", 33); }, {"33", "4 heads"});
  expect_refusal([] { read_with("num_attention_heads", 0); }, {"num_attention_heads is 0"});
  expect_refusal([] { read_with("hidden_size", int64_t(1) << 60); }, {"config.json", "hidden"});
}

// ---- Weights

TEST(HuggingFace, Pitfall116_TiedHeadIsTheEmbedding) {
  TemporaryFolder folder;
  write_safetensors(folder / "model.safetensors", two_tensors());
  WeightFiles files(folder.path());
  Parameter head = parameter("lm_head.weight", whole_shard({6, 4}));
  EXPECT_EQ(read_parameter(head, files, true).values<float>(), counting(24));
}

TEST(HuggingFace, Pitfall116_UntiedHeadThatIsMissingIsNamed) {
  TemporaryFolder folder;
  write_safetensors(folder / "model.safetensors", two_tensors());
  WeightFiles files(folder.path());
  Parameter head = parameter("lm_head.weight", whole_shard({6, 4}));
  expect_refusal([&] { read_parameter(head, files, false); }, {"lm_head.weight", "tie"});
}

TEST(HuggingFace, Pitfall116_EveryTensorOfAShardedModelIsReadOnce) {
  WeightFiles files(kReference / "tiny_llama_tied");
  std::vector<std::string> names = files.names();
  EXPECT_EQ(names.size(), 1 + 2 * 16 + 1u);  // embedding, 9 weights and 7 biases a layer, norm
  EXPECT_TRUE(std::is_sorted(names.begin(), names.end()));
  EXPECT_EQ(std::adjacent_find(names.begin(), names.end()), names.end());
  EXPECT_FALSE(files.has("lm_head.weight"));
  for (const std::string& name : names) EXPECT_EQ(files.read(name).shape(), files.info(name).shape);

  TemporaryFolder folder;
  write_sharded(folder);
  WeightFiles mine(folder.path());
  EXPECT_EQ(mine.read("model.embed_tokens.weight").values<float>(), counting(24));
  EXPECT_EQ(mine.read("model.norm.weight").values<float>(), (std::vector<float>{1, 2, 3, 4}));
  expect_refusal([&] { mine.read("other"); }, {"no tensor other"});
}

TEST(HuggingFace, Pitfall116_MissingFileIsNamed) {
  TemporaryFolder folder;
  write_sharded(folder);
  fs::remove(folder / "b.safetensors");
  expect_refusal([&] { WeightFiles files(folder.path()); },
                 {"b.safetensors is missing", "model.norm.weight"});
  fs::remove(folder / "model.safetensors.index.json");
  expect_refusal([&] { WeightFiles files(folder.path()); },
                 {"neither model.safetensors nor model.safetensors.index.json"});
}

TEST(HuggingFace, Pitfall116_IndexAndFilesMustAgree) {
  TemporaryFolder folder;
  auto with_index = [&](const Json& map) {
    write_sharded(folder);
    folder.write("model.safetensors.index.json", Json{{"weight_map", map}}.dump());
  };
  auto refuses = [&](const std::vector<std::string>& parts) {
    expect_refusal([&] { WeightFiles files(folder.path()); }, parts);
  };
  const char *table = "model.embed_tokens.weight", *norm = "model.norm.weight";
  with_index({{table, "a.safetensors"}, {norm, "b.safetensors"}, {"extra", "b.safetensors"}});
  refuses({"b.safetensors holds no tensor extra", "index.json"});
  with_index({{table, "a.safetensors"}, {norm, "a.safetensors"}});
  refuses({"a.safetensors holds no tensor model.norm.weight"});
  with_index({{table, "a.safetensors"}, {norm, "b.safetensors"}});
  write_safetensors(folder / "b.safetensors", two_tensors());  // now the table is there twice
  refuses({"tensor model.embed_tokens.weight", "b.safetensors", "it is in a.safetensors"});
  with_index({{norm, "b.safetensors"}});
  write_safetensors(folder / "b.safetensors", two_tensors());
  refuses({"tensor model.embed_tokens.weight", "nothing of it"});
  with_index({{table, "../a.safetensors"}});
  refuses({"\"../a.safetensors\"", "beside the index"});
  with_index({{table, 1}});
  refuses({"into 1", "not the name of a file"});
  folder.write("model.safetensors.index.json", "{}");
  refuses({"has no weight_map"});
  folder.write("model.safetensors.index.json",
               "{\"weight_map\":{\"a\":\"a.safetensors\",\"a\":\"b.safetensors\"}}");
  refuses({"\"a\" twice"});
}

TEST(HuggingFace, ShardsAreCutOutOfTheWholeTensor) {
  TemporaryFolder folder;
  write_safetensors(folder / "model.safetensors",
                    {{"w", Tensor::from<float>(counting(24), {6, 4})},
                     {"cube", Tensor::from<float>(counting(24), {2, 3, 4})}});
  WeightFiles files(folder.path());
  auto values = [&](const char* name, Shard shard) {
    return read_parameter(parameter(name, std::move(shard)), files, false).values<float>();
  };
  using Floats = std::vector<float>;
  EXPECT_EQ(values("w", whole_shard({6, 4})), counting(24));
  EXPECT_EQ(values("w", cut_shard({6, 4}, 0, {4, 2})), (Floats{16, 17, 18, 19, 20, 21, 22, 23}));
  EXPECT_EQ(values("w", cut_shard({6, 4}, 1, {3, 1})), (Floats{3, 7, 11, 15, 19, 23}));
  EXPECT_EQ(values("cube", cut_shard({2, 3, 4}, 1, {1, 1})), (Floats{4, 5, 6, 7, 16, 17, 18, 19}));
  EXPECT_TRUE(values("w", cut_shard({6, 4}, 0, {6, 0})).empty());

  // Every cut, element by element, against the definition.
  for (int dim : {0, 1})
    for (int size : {2, 3, 4})
      for (int rank = 0; rank < size; ++rank) {
        Shard shard = cut_shard({6, 4}, dim, share(dim == 0 ? 6 : 4, {rank, size}));
        Floats local = values("w", shard);
        ASSERT_EQ(int64_t(local.size()), elements(shard.local));
        for (size_t i = 0; i < local.size(); ++i)
          EXPECT_EQ(local[i], float(shard.whole_index(int64_t(i))));
      }
}

TEST(HuggingFace, WeightsOfOtherTypesBecomeFp32) {
  TemporaryFolder folder;
  write_safetensors(folder / "model.safetensors",
                    {{"b", Tensor::from<bf16>({bf16(1.5f), bf16(-2)}, {2})},
                     {"d", Tensor::from<double>({0.25, 3}, {2})},
                     {"i", Tensor::from<int32_t>({1, 2}, {2})}});
  WeightFiles files(folder.path());
  auto values = [&](const char* name) {
    return read_parameter(parameter(name, whole_shard({2})), files, false).values<float>();
  };
  EXPECT_EQ(values("b"), (std::vector<float>{1.5f, -2}));
  EXPECT_EQ(values("d"), (std::vector<float>{0.25f, 3}));
  expect_refusal([&] { values("i"); }, {"tensor i", "I32", "BF16"});
}

TEST(HuggingFace, RefusesAnotherShapeWithBothShapes) {
  WeightFiles files(kReference / "tiny_llama");
  Parameter p = parameter("model.layers.1.mlp.down_proj.weight", whole_shard({48, 32}));
  expect_refusal([&] { read_parameter(p, files, false); },
                 {"model.layers.1.mlp.down_proj.weight", "[32, 48]", "[48, 32]"});
  p = parameter("model.layers.2.mlp.down_proj.weight", whole_shard({32, 48}));
  expect_refusal([&] { read_parameter(p, files, false); },
                 {"no tensor model.layers.2.mlp.down_proj.weight"});
}

TEST(HuggingFace, TensorsThatNoParameterTakesAreRefused) {
  TemporaryFolder folder;
  NamedTensors tensors = two_tensors();
  const std::vector<std::string> names = {tensors[0].first, tensors[1].first};
  tensors.push_back({"model.layers.0.self_attn.rotary_emb.inv_freq", tensors[1].second});
  tensors.push_back({"lm_head.weight", tensors[0].second});
  write_safetensors(folder / "model.safetensors", tensors);
  WeightFiles files(folder.path());
  EXPECT_NO_THROW(refuse_unused(files, names, true));
  expect_refusal([&] { refuse_unused(files, names, false); }, {"tensor lm_head.weight"});
  expect_refusal([&] { refuse_unused(files, {names[0]}, true); }, {"tensor model.norm.weight"});
}

// ---- Export

TEST(HuggingFace, ExportIsReadBackAsTheSameModel) {
  for (const char* name : {"tiny_llama", "tiny_llama_tied"}) {
    ModelConfig config = read_config(kReference / name);
    WeightFiles files(kReference / name);
    NamedTensors weights;
    for (const std::string& tensor : files.names()) weights.push_back({tensor, files.read(tensor)});
    if (config.tied) weights.push_back({"lm_head.weight", files.read("model.embed_tokens.weight")});

    TemporaryFolder folder;
    write_huggingface(folder / "out", config, weights);
    ModelConfig c = read_config(folder / "out");
    EXPECT_EQ(c.parameters(), config.parameters());
    EXPECT_EQ(c.rope_theta, config.rope_theta);
    EXPECT_EQ(c.head_dim, config.head_dim);
    EXPECT_EQ(c.kv_heads, config.kv_heads);
    EXPECT_EQ(c.max_length, config.max_length);
    EXPECT_EQ(c.norm_epsilon, config.norm_epsilon);
    EXPECT_EQ(c.init_std, config.init_std);
    EXPECT_EQ(c.tied, config.tied);
    EXPECT_EQ(c.attention_bias, config.attention_bias);
    EXPECT_EQ(c.mlp_bias, config.mlp_bias);

    WeightFiles again(folder / "out");
    EXPECT_EQ(again.names(), files.names());  // a tied head is not stored
    for (const std::string& tensor : files.names())
      EXPECT_EQ(again.read(tensor).values<float>(), files.read(tensor).values<float>());
  }
}

}  // namespace
}  // namespace lockstep
