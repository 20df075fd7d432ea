// Which shapes a model may have, and how many weights it has.

#include "common/model_config.h"

#include <gtest/gtest.h>

#include "common/huggingface.h"
#include "tests/temporary.h"

namespace lockstep {
namespace {

const std::filesystem::path kReference =
    std::filesystem::path(LOCKSTEP_SOURCE_DIR) / "tests/reference";

TEST(ModelConfig, ValidateNamesTheValuesAndWhatWouldBeValid) {
  auto refuses = [](auto change, const std::vector<std::string>& parts) {
    ModelConfig c;
    change(c);
    expect_refusal([&] { c.validate(); }, parts);
  };
  EXPECT_NO_THROW(ModelConfig{}.validate());
  refuses([](auto& c) { c.heads = 8, c.kv_heads = 3; }, {"8", "3", "1, 2, 4, 8"});
  refuses([](auto& c) { c.kv_heads = 8; }, {"4 attention heads", "8", "1, 2, 4"});
  refuses([](auto& c) { c.head_dim = 7; }, {"7", "even"});
  refuses([](auto& c) { c.layers = 0; }, {"layers is 0"});
  refuses([](auto& c) { c.hidden = -4; }, {"-4"});
  refuses([](auto& c) { c.vocab = 1 << 30; }, {"vocabulary", "1000000"});
  refuses([](auto& c) { c.heads = 100'000, c.kv_heads = 1; }, {"heads times their size"});
  refuses([](auto& c) { c.dropout = 1; }, {"dropout", "less than 1"});
  refuses([](auto& c) { c.dropout = -0.1; }, {"-0.1"});
  refuses([](auto& c) { c.rope_theta = 0; }, {"rope_theta"});
  refuses([](auto& c) { c.norm_epsilon = 0; }, {"epsilon"});
  refuses([](auto& c) { c.max_length = -1; }, {"-1"});
}

// The files of the reference hold exactly the parameters of their models.
TEST(ModelConfig, ParametersEqualsWhatHuggingFaceStores) {
  for (const char* name : {"tiny_llama", "tiny_llama_tied"}) {
    WeightFiles files(kReference / name);
    int64_t stored = 0;
    for (const std::string& tensor : files.names()) stored += elements(files.info(tensor).shape);
    EXPECT_EQ(read_config(kReference / name).parameters(), stored) << name;
  }
  ModelConfig largest;
  largest.layers = largest.hidden = largest.ffn = largest.vocab = 1'000'000;
  largest.heads = largest.kv_heads = 1'000, largest.head_dim = 1'000;
  largest.attention_bias = largest.mlp_bias = true;
  EXPECT_GT(largest.parameters(), int64_t(7e18));  // and not negative: nothing overflowed
  EXPECT_THROW(largest.validate(), Error);         // their bytes would
}

}  // namespace
}  // namespace lockstep
