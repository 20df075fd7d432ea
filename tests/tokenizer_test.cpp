// Tokenizers: the ids are Hugging Face's, the way back gives the text, and files of another kind
// are refused. tests/reference/make_tokenizers.py made the files and the expected ids.

#include "common/tokenizer.h"

#include <nlohmann/json.hpp>

#include "common/safetensors.h"
#include "common/unicode.h"
#include "tests/temporary.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;
using Json = nlohmann::json;
using Ids = std::vector<int32_t>;

const fs::path kFolder = fs::path(LOCKSTEP_SOURCE_DIR) / "tests/reference/tokenizers";

Ids expected(const std::string& name) {
  SafetensorsFile file(kFolder / "expected.safetensors");
  std::vector<uint16_t> words = file.read(name).values<uint16_t>();
  return Ids(words.begin(), words.end());
}

// What Hugging Face's encode() gives: with the tokens that stand before every text.
Ids encode(const Tokenizer& tokenizer, const std::string& text) {
  Ids ids = tokenizer.begin(), rest = tokenizer.encode(text);
  ids.insert(ids.end(), rest.begin(), rest.end());
  return ids;
}

// Names the first difference and the text around it, which a vector of 100000 ids does not.
void expect_equal(const Tokenizer& tokenizer, const Ids& got, const Ids& reference) {
  size_t i = 0;
  while (i < got.size() && i < reference.size() && got[i] == reference[i]) ++i;
  if (i == got.size() && i == reference.size()) return;
  auto around = [&](const Ids& ids) {
    size_t first = i < 5 ? 0 : i - 5, last = std::min(ids.size(), i + 5);
    std::string out;
    for (size_t k = first; k < last; ++k) out += text("[", tokenizer.decode({ids[k]}), "]");
    return out;
  };
  ADD_FAILURE() << "token " << i << " of " << got.size() << " and " << reference.size() << ": "
                << around(got) << " is not " << around(reference);
}

class TokenizerFiles : public testing::TestWithParam<const char*> {};
INSTANTIATE_TEST_SUITE_P(Kinds, TokenizerFiles, testing::Values("gpt2", "smollm", "llama3"),
                         [](const auto& info) { return std::string(info.param); });

TEST_P(TokenizerFiles, GivesTheIdsOfHuggingFaceAndTheTextBack) {
  Tokenizer tokenizer(kFolder / (GetParam() + std::string(".json")));
  std::string text = content_of(kFolder / "text.txt");
  ASSERT_GT(text.size(), 200000u);
  Ids ids = encode(tokenizer, text);
  expect_equal(tokenizer, ids, expected(GetParam()));
  EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
}

// Bytes that are no UTF-8 (which no string of Hugging Face's can hold) keep their value.
TEST_P(TokenizerFiles, BytesThatAreNoUtf8PassThrough) {
  Tokenizer tokenizer(kFolder / (GetParam() + std::string(".json")));
  std::string all;
  for (int b = 0; b < 256; ++b) all += char(b);
  for (const std::string& text :
       {all, std::string("caf\xc3"), std::string("\xe6\xbc over \xf0\x9f\x98"),
        std::string("\xc0\xaf \xed\xa0\x80 \xf4\x90\x80\x80 \xff\xfe"), std::string("a\0b", 3)})
    EXPECT_EQ(tokenizer.decode(tokenizer.encode(text)), text);
  // the bytes are characters of their own: what stands beside them is split as ever
  Ids apart = tokenizer.encode(" co"), together = tokenizer.encode("\xff co");
  EXPECT_EQ(Ids(together.begin() + 1, together.end()), apart);
}

TEST(Tokenizer, BytesAreTokens) {
  Tokenizer tokenizer = Tokenizer::bytes();
  EXPECT_EQ(tokenizer.vocab_size(), 256);
  EXPECT_EQ(tokenizer.encode("Az\xff\n"), (Ids{65, 122, 255, 10}));
  EXPECT_EQ(tokenizer.decode({72, 105}), "Hi");
  EXPECT_TRUE(tokenizer.encode("").empty());
  EXPECT_FALSE(tokenizer.has(256));
  expect_refusal([&] { tokenizer.decode({1, 256}); }, {"256", "255"});
}

TEST(Tokenizer, AddedTokensAreFoundLongestFirst) {
  Tokenizer llama(kFolder / "llama3.json");
  int32_t shorter = llama.special("<|reserved|>").value();
  int32_t longer = llama.special("<|reserved|>more").value();
  EXPECT_EQ(llama.encode("<|reserved|>more<|reserved|>"), (Ids{longer, shorter}));
  EXPECT_EQ(llama.begin(), (Ids{llama.special("<|begin_of_text|>").value()}));
  EXPECT_EQ(llama.decode({longer}), "<|reserved|>more");
  EXPECT_EQ(llama.special("<|endoftext|>"), std::nullopt);
  EXPECT_EQ(llama.vocab_size(), longer + 1);
  Tokenizer smollm(kFolder / "smollm.json");
  EXPECT_TRUE(smollm.begin().empty());
  EXPECT_EQ(smollm.encode("<file sep>"), (Ids{smollm.special("<file sep>").value()}));
}

TEST(Tokenizer, AWholeWordNeedsNoMerges) {
  Tokenizer llama(kFolder / "llama3.json");
  EXPECT_EQ(llama.encode(" jukalo").size(), 1u);  // in vocab, and no merge makes it
}

Json file_of(const std::string& name) {
  return Json::parse(content_of(kFolder / (name + ".json")));
}

Tokenizer written(const Json& json) {
  TemporaryFolder folder;
  return Tokenizer(folder.write("tokenizer.json", json.dump()));
}

TEST(Tokenizer, PrefixSpaceStandsBeforeEveryPart) {
  Json json = file_of("gpt2");
  json["pre_tokenizer"]["add_prefix_space"] = true;
  Tokenizer tokenizer = written(json);
  Ids ids = tokenizer.encode(content_of(kFolder / "prefix.txt"));
  expect_equal(tokenizer, ids, expected("gpt2_prefix"));
  EXPECT_EQ(tokenizer.encode(""), expected("gpt2_prefix_of_nothing"));
  EXPECT_EQ(tokenizer.decode(tokenizer.encode("ba")), " ba");
}

TEST(Tokenizer, BothFormsOfMergesAreRead) {
  Json json = file_of("gpt2");
  for (Json& merge : json["model"]["merges"]) {
    std::string both = merge;
    merge = {both.substr(0, both.find(' ')), both.substr(both.find(' ') + 1)};
  }
  std::string text = content_of(kFolder / "text.txt").substr(0, 20000);
  EXPECT_EQ(written(json).encode(text), Tokenizer(kFolder / "gpt2.json").encode(text));
}

TEST(Tokenizer, MergesGoByRankAndFromTheLeft) {
  Merges merges;  // 0 = a, 1 = b, 2 = c, 3 = ab, 4 = bc, 5 = aa, 6 = abc
  merges.add(1, 2, 0, 4);
  merges.add(0, 1, 1, 3);
  merges.add(0, 0, 2, 5);
  merges.add(3, 2, 3, 6);
  EXPECT_EQ(merges.apply({0, 1, 2}), (Ids{0, 4}));  // b+c came first in training
  EXPECT_EQ(merges.apply({0, 0, 0}), (Ids{5, 0}));
  EXPECT_EQ(merges.apply({0, 0, 1}), (Ids{0, 3}));
  EXPECT_EQ(merges.apply({}), Ids{});
  EXPECT_EQ(merges.apply(Ids(200001, 0)).size(), 100001u);  // long words are no trap
}

TEST(Tokenizer, Utf8OfEveryLengthAndNothingElse) {
  for (uint32_t code :
       {0u, 0x7fu, 0x80u, 0x7ffu, 0x800u, 0xd7ffu, 0xe000u, 0xffffu, 0x10000u, 0x10ffffu}) {
    std::string bytes = encode_utf8(code);
    CodePoint back = decode_utf8(bytes + "x", 0);
    EXPECT_TRUE(back.valid && back.code == code && size_t(back.bytes) == bytes.size()) << code;
    EXPECT_EQ(utf8_length(static_cast<unsigned char>(bytes[0])), back.bytes);
  }
  for (const char* broken :
       {"\x80", "\xc0\xaf", "\xc1\xbf", "\xe0\x80\xaf", "\xed\xa0\x80", "\xf0\x80\x80\x80",
        "\xf4\x90\x80\x80", "\xf5\x80", "\xff", "\xc3", "\xe2\x82", "\xc3(", "\xf0\x9f\x98"}) {
    CodePoint c = decode_utf8(broken, 0);
    EXPECT_FALSE(c.valid) << broken;
    EXPECT_EQ(c.bytes, 1) << broken;
  }
}

// What a file asks for and we lack is named.
void expect_refused(const std::string& name, const std::string& pointer, const Json& value,
                    const std::vector<std::string>& parts) {
  Json json = file_of(name);
  json[Json::json_pointer(pointer)] = value;
  std::vector<std::string> named = {"tokenizer.json"};
  named.insert(named.end(), parts.begin(), parts.end());
  expect_refusal([&] { written(json); }, named);
}

TEST(Tokenizer, RefusesOtherKindsByName) {
  expect_refused("gpt2", "/model/type", "Unigram", {"Unigram", "BPE"});
  expect_refused("gpt2", "/normalizer", {{"type", "NFC"}}, {"normalizer", "NFC"});
  expect_refused("gpt2", "/truncation", {{"max_length", 512}}, {"truncation", "512"});
  expect_refused("gpt2", "/model/byte_fallback", true, {"byte_fallback"});
  expect_refused("gpt2", "/model/dropout", 0.1, {"dropout", "0.1"});
  expect_refused("gpt2", "/model/continuing_subword_prefix", "##", {"continuing_subword_prefix"});
  expect_refused("gpt2", "/model/end_of_word_suffix", "</w>", {"end_of_word_suffix", "</w>"});
  expect_refused("gpt2", "/pre_tokenizer", {{"type", "Whitespace"}},
                 {"pre_tokenizer", "Whitespace"});
  expect_refused("gpt2", "/pre_tokenizer", nullptr, {"pre_tokenizer"});
  expect_refused("gpt2", "/pre_tokenizer/use_regex", false, {"pre_tokenizer", "use_regex"});
  expect_refused("gpt2", "/decoder", {{"type", "WordPiece"}}, {"decoder", "WordPiece"});
  expect_refused("smollm", "/pre_tokenizer/pretokenizers/0/individual_digits", false,
                 {"individual_digits"});
  expect_refused("smollm", "/pre_tokenizer/pretokenizers/1/add_prefix_space", true, {"Sequence"});
  expect_refused("llama3", "/pre_tokenizer/pretokenizers/0/pattern/Regex", "\\p{N}{1,2}",
                 {"pre_tokenizer", "{1,2}"});
  expect_refused("llama3", "/pre_tokenizer/pretokenizers/0/behavior", "Removed", {"Removed"});
  expect_refused("llama3", "/pre_tokenizer/pretokenizers/0/invert", true, {"invert"});
  expect_refused("llama3", "/post_processor/processors/1/type", "BertProcessing",
                 {"BertProcessing"});
  Json template_end = {{"SpecialToken", {{"id", "<|begin_of_text|>"}, {"type_id", 0}}}};
  expect_refused("llama3", "/post_processor/processors/1/single/2", template_end, {"behind"});
  for (const char* key : {"lstrip", "rstrip", "single_word"})
    expect_refused("smollm", text("/added_tokens/1/", key), true, {"<|im_start|>", key});
}

TEST(Tokenizer, RefusesBrokenFiles) {
  TemporaryFolder folder;
  expect_refusal([&] { Tokenizer(folder / "absent.json"); }, {"absent.json"});
  expect_refusal([&] { Tokenizer(folder.write("t.json", "{\"model\":")); }, {"t.json", "JSON"});
  expect_refusal([&] { Tokenizer(folder.write("t.json", "{}")); }, {"no pre_tokenizer"});
  expect_refused("gpt2", "/model/vocab", Json::array(), {"vocab"});
  expect_refused("gpt2", "/model/vocab/a", -1, {"\"a\"", "-1"});
  expect_refused("gpt2", "/model/vocab/a", int64_t(1) << 40, {"\"a\"", "1099511627776"});
  expect_refused("gpt2", "/model/vocab/a", "7", {"\"a\"", "\"7\""});
  expect_refused("gpt2", "/model/vocab/a", 5, {"id 5"});
  expect_refused("gpt2", "/model/merges/3", "abc", {"merge 3", "abc"});
  expect_refused("gpt2", "/model/merges/3", "a b c", {"merge 3", "a b c"});
  expect_refused("gpt2", "/model/merges/3", {"a", "b", "c"}, {"merge 3"});
  expect_refused("gpt2", "/model/merges/3", "q Q", {"merge 3", "\"qQ\""});
  expect_refused("gpt2", "/model/merges", 7, {"merges"});
  expect_refused("gpt2", "/added_tokens/0/id", 3, {"id 3", "<|endoftext|>"});
  expect_refused("llama3", "/added_tokens/0/id", 5000, {"<|begin_of_text|>", "5000"});
  expect_refused("gpt2", "/added_tokens/0/content", "", {"no characters"});
  expect_refused("gpt2", "/added_tokens/0/lstrip", 1, {"lstrip", "1"});
}

TEST(Tokenizer, AByteWithoutATokenIsNamedWhenATextHoldsIt) {
  Json json = file_of("gpt2");
  int32_t id = json["model"]["vocab"]["ÿ"];  // which stands for the byte 255
  json["model"]["vocab"].erase("ÿ");
  Tokenizer tokenizer = written(json);
  EXPECT_EQ(tokenizer.decode(tokenizer.encode("Go")), "Go");
  expect_refusal([&] { tokenizer.encode("\xff"); }, {"byte 255"});
  EXPECT_FALSE(tokenizer.has(id));
  expect_refusal([&] { tokenizer.decode({id}); }, {text("token ", id)});
}

}  // namespace
}  // namespace lockstep
