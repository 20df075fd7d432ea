// Generation: the cache changes nothing but the speed, and tokens are drawn as the papers say.

#include <gtest/gtest.h>

#include <set>

#include "01_single_gpu/kv_cache.h"
#include "01_single_gpu/printer.h"
#include "01_single_gpu/sampling.h"
#include "common/huggingface.h"
#include "tests/rig.h"
#include "tests/temporary.h"

namespace lockstep {
namespace {

const std::string kReference = LOCKSTEP_SOURCE_DIR "/tests/reference/";
using Ids = std::vector<int32_t>;

std::vector<Device> devices() {
  if (device::available()) return {Device::CPU, Device::CUDA};
  return {Device::CPU};
}

// Fills the weights of a model whose Parts the test has chosen.
using Fill = std::function<void(Stage&)>;

void fill_from_hugging_face(Stage& model, const std::string& dir) {
  DataParallel parallel({&model}, {});
  parallel.allocate();
  WeightFiles files(dir);
  for (const Owned& o : parallel.owned())
    assign(o, read_parameter(*o.parameter, files, model.config().tied));
}
void fill_at_random(Stage& model) {
  DataParallel parallel({&model}, {});
  parallel.allocate();
  initialise(parallel.owned(), 3);
}

Ids greedy_with_full_forward(Stage& model, Ids text, int64_t count) {
  for (int64_t i = 0; i < count; ++i) text.push_back(pick(next_logits(model, text), 0, 0));
  return text;
}

// The prompt in pieces of `piece` tokens, then one token after the other.
Ids greedy_with_cache(Stage& model, KvCache& cache, Ids text, int64_t count, int64_t piece) {
  cache.clear();
  std::vector<float> logits;
  int64_t prompt = int64_t(text.size());
  for (int64_t at = 0; at < prompt; at += piece) {
    Ids part(text.begin() + at, text.begin() + std::min(prompt, at + piece));
    logits = next_logits(model, part, cache.length());
  }
  for (int64_t i = 0; i < count; ++i) {
    text.push_back(pick(logits, 0, 0));
    if (i + 1 < count) logits = next_logits(model, {text.back()}, cache.length());
  }
  EXPECT_EQ(cache.length(), int64_t(text.size()) - 1);
  return text;
}

// How many different tokens were written: a model that repeats one would prove little.
size_t expect_same_tokens(const ModelConfig& config, int64_t length, const Fill& fill) {
  std::set<int32_t> written;
  for (Device device : devices()) {
    memory_account()->poison = true;  // rows of the cache that nobody wrote are NaN
    KvCache cache(config, length, DType::F32, device);
    Parts parts = plain_parts();
    Stage plain(config, parts, DType::F32, device);
    use_kv_cache(parts, cache);
    Stage cached(config, parts, DType::F32, device);
    fill(plain);
    fill(cached);
    RandomStream draw(1, "prompts");
    for (int64_t n : {int64_t(1), int64_t(2), length / 2, length - 10}) {
      Ids prompt;
      for (int64_t i = 0; i < n; ++i)
        prompt.push_back(int32_t(draw.at(uint64_t(100 * n + i)).x[0] % uint64_t(config.vocab)));
      Ids expected = greedy_with_full_forward(plain, prompt, length - n);
      for (int64_t piece : {n, int64_t(1), int64_t(3)})
        EXPECT_EQ(greedy_with_cache(cached, cache, prompt, length - n, piece), expected)
            << device::name(device) << ", prompt " << n << " in pieces of " << piece;
      written.insert(expected.begin() + n, expected.end());
      // one more: the same logits, too
      auto as_doubles = [](const std::vector<float>& v) {
        return std::vector<double>(v.begin(), v.end());
      };
      std::vector<float> logits = next_logits(cached, {expected.back()}, cache.length());
      EXPECT_LT(relative_error(as_doubles(logits), as_doubles(next_logits(plain, expected))), 1e-5);
    }
    memory_account()->poison = false;
  }
  return written.size();
}

TEST(Generate, CacheGivesTheTokensOfTheFullForward) {
  auto distinct = [](const std::string& dir) {
    return expect_same_tokens(read_config(dir), 50,
                              [&](Stage& model) { fill_from_hugging_face(model, dir); });
  };
  EXPECT_GT(distinct(kReference + "tiny_llama"), 10u);
  distinct(kReference + "tiny_llama_tied");  // repeats itself: compared by its logits
}

TEST(Generate, CacheGivesTheTokensOfTheFullForwardWithGroupedHeads) {
  ModelConfig c;
  c.layers = 3;
  c.hidden = 48;
  c.heads = 6;
  c.kv_heads = 2;
  c.head_dim = 20;  // heads x head_dim is not hidden
  c.ffn = 64;
  c.vocab = 300;
  c.init_std = 0.3;
  for (int64_t kv_heads : {3, 1}) {
    c.kv_heads = kv_heads;
    EXPECT_GT(expect_same_tokens(c, 80, fill_at_random), 10u);
  }
}

TEST(Generate, CacheTakesTheBytesOfTheFormula) {
  ModelConfig c = small_config();  // 2 layers, 2 kv heads of 4
  auto account = std::make_shared<MemoryAccount>();
  std::swap(memory_account(), account);
  KvCache cache(c, 10, DType::BF16, Device::CPU);
  EXPECT_EQ(memory_account()->now(Category::Buffers), 2 * 2 * 10 * 8 * 2);
  EXPECT_EQ(KvCache::bytes(c, 10, DType::BF16), 2 * 2 * 10 * 8 * 2);
  std::swap(memory_account(), account);
}

TEST(Generate, CacheRefusesWhatItCannotServe) {
  ModelConfig c = small_config();
  KvCache cache(c, 4, DType::F32, Device::CPU);
  Parts parts = plain_parts();
  use_kv_cache(parts, cache);
  Stage model(c, parts, DType::F32, Device::CPU);
  fill_at_random(model);
  next_logits(model, {1, 2, 3});
  expect_refusal([&] { next_logits(model, {1, 2}, 3); }, {"room for 4", "5 have come"});
  cache.clear();
  expect_refusal([&] { model.forward(*std::make_unique<Tape>(), sequence({1}, Device::CPU)); },
                 {"no gradient"});
}

// ---- Drawing

// Probabilities 0.4, 0.3, 0.2 and 0.1, not in this order.
const std::vector<float> kLogits = {std::log(0.2f), std::log(0.4f), std::log(0.1f), std::log(0.3f)};

// How often each token comes, as u goes through [0, 1) evenly.
std::vector<double> distribution(const std::vector<float>& logits, const Sampling& s) {
  constexpr int kDraws = 100000;
  std::vector<double> share(logits.size());
  for (int i = 0; i < kDraws; ++i)
    share[size_t(next_token(logits, s, (i + 0.5) / kDraws))] += 1.0 / kDraws;
  return share;
}
void expect_distribution(const Sampling& s, const std::vector<double>& expected) {
  std::vector<double> share = distribution(kLogits, s);
  for (size_t i = 0; i < expected.size(); ++i)
    EXPECT_NEAR(share[i], expected[i], 1e-4) << "token " << i;
}

TEST(Sampling, KnownDistributions) {
  auto with = [](double temperature, int64_t top_k, double top_p) {
    return Sampling{temperature, top_k, top_p};
  };
  expect_distribution(with(1, 0, 1), {0.2, 0.4, 0.1, 0.3});
  expect_distribution(with(0, 0, 1), {0, 1, 0, 0});
  // weights 1/4 and 16, 9, 4, 1 of 30
  expect_distribution(with(0.5, 0, 1), {4.0 / 30, 16.0 / 30, 1.0 / 30, 9.0 / 30});
  expect_distribution(with(1, 1, 1), {0, 1, 0, 0});
  expect_distribution(with(1, 2, 1), {0, 4.0 / 7, 0, 3.0 / 7});
  expect_distribution(with(1, 9, 1), {0.2, 0.4, 0.1, 0.3});
  expect_distribution(with(1, 0, 0.01), {0, 1, 0, 0});
  expect_distribution(with(1, 0, 0.39), {0, 1, 0, 0});
  expect_distribution(with(1, 0, 0.41), {0, 4.0 / 7, 0, 3.0 / 7});
  expect_distribution(with(1, 0, 0.71), {2.0 / 9, 4.0 / 9, 0, 3.0 / 9});
  expect_distribution(with(1, 0, 0.91), {0.2, 0.4, 0.1, 0.3});
  // top-p counts after temperature (0.533 is more than 0.5) and within what top-k left (4/7 too)
  expect_distribution(with(0.5, 0, 0.5), {0, 1, 0, 0});
  expect_distribution(with(1, 2, 0.5), {0, 1, 0, 0});
  expect_distribution(with(1, 2, 0.6), {0, 4.0 / 7, 0, 3.0 / 7});
}

TEST(Sampling, OfEqualLogitsTheSmallerIdIsLikelier) {
  std::vector<float> equal(1000, 0.5f);
  EXPECT_EQ(next_token(equal, {0, 0, 1}, 0.99), 0);
  std::vector<float> kept = keep_likely(equal, {1, 3, 1});
  for (size_t i = 0; i < kept.size(); ++i) EXPECT_EQ(std::isfinite(kept[i]), i < 3) << i;
  kept = keep_likely(equal, {1, 0, 0.0045});  // five tokens of 0.001 each
  for (size_t i = 0; i < kept.size(); ++i) EXPECT_EQ(std::isfinite(kept[i]), i < 5) << i;
}

TEST(Sampling, LogitsThatAreNoNumbersAreRefused) {
  expect_refusal([] { next_token({0, NAN}, {1, 0, 1}, 0.5); }, {"token 1", "nan"});
  expect_refusal([] { next_token({INFINITY, 0}, {0, 0, 1}, 0.5); }, {"token 0", "inf"});
}

TEST(Printer, ShowsWholeCharactersAndNothingThatHarmsATerminal) {
  auto shown = [](const std::vector<std::string>& pieces) {
    std::FILE* file = std::tmpfile();
    Printer printer(file);
    std::string after_each;
    for (const std::string& piece : pieces) {
      printer.print(piece);
      after_each += text(std::ftell(file), " ");
    }
    printer.finish();
    std::string out(size_t(std::ftell(file)), '\0');
    std::rewind(file);
    EXPECT_EQ(std::fread(out.data(), 1, out.size(), file), out.size());
    std::fclose(file);
    return after_each + out;
  };
  EXPECT_EQ(shown({"a", "\xc3", "\xa9", "b"}),
            "1 1 3 4 a\xc3\xa9"
            "b");
  EXPECT_EQ(shown({"\x1b[31m\n\tx\x7f"}), "9 ?[31m\n\tx?");
  EXPECT_EQ(shown({"\xc2\x9b"
                   "1m"}),
            "3 ?1m");  // a control character of two bytes
  EXPECT_EQ(shown({"\xff\xe2", "\x82"}), "1 1 ???");
}

}  // namespace
}  // namespace lockstep
