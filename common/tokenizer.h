#pragma once
// Text to tokens and back. The simplest tokenizer takes every byte as a token; a byte-level BPE,
// read from a Hugging Face tokenizer.json, finds longer pieces:
//
//   text ─▶ added tokens ─▶ words (pretokenizer.h) ─▶ bytes ─▶ merges (bpe.h) ─▶ ids
//           <|endoftext|>    "Hello", " world"
//
// Because it starts from bytes, every text has tokens and decode(encode(text)) is the text. Three
// kinds of file are read, those of GPT-2, SmolLM and Llama 3; anything that another kind asks for
// is refused by name, since a tokenizer that is almost right gives a model almost the right text.
// Format: https://github.com/huggingface/tokenizers.

#include <array>
#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <unordered_map>
#include <vector>

#include "common/bpe.h"
#include "common/pretokenizer.h"

namespace lockstep {

// A token that is found in the text before anything is split or merged.
struct AddedToken {
  std::string content;
  int32_t id = 0;
  bool normalized = false;  // these are looked for last, between those that are not
};

// What a tokenizer.json says, in bytes: the file writes every byte of a token as one printable
// character (byte_of_character), because JSON has no bytes.
struct TokenizerData {
  Splitter splitter = Splitter::Whole;
  bool prefix_space = false;        // put a space before a text that does not begin with one
  bool ignore_merges = false;       // a word that is a token is not merged step by step
  std::vector<std::string> tokens;  // by id; empty where there is none
  std::unordered_map<std::string, int32_t> ids;
  Merges merges;
  std::vector<AddedToken> added;
  std::vector<int32_t> begin;  // what stands before every text: Llama 3's <|begin_of_text|>
};
TokenizerData read_tokenizer(const std::filesystem::path& path);  // tokenizer_json.cpp

class Tokenizer {
 public:
  static Tokenizer bytes();
  explicit Tokenizer(const std::filesystem::path& tokenizer_json);

  // Without begin(). Bytes that are no UTF-8 pass through as the tokens of those bytes.
  std::vector<int32_t> encode(std::string_view text) const;
  // The bytes of these tokens; added tokens appear as they are written. With a file that asks for
  // add_prefix_space, decode(encode("a")) is " a", as in Hugging Face.
  std::string decode(const std::vector<int32_t>& ids) const;

  int64_t vocab_size() const { return int64_t(data_.tokens.size()); }  // the largest id + 1
  bool has(int32_t id) const;
  std::optional<int32_t> special(std::string_view name) const;  // the id of an added token
  const std::vector<int32_t>& begin() const { return data_.begin; }

 private:
  using Cache = std::unordered_map<std::string, std::vector<int32_t>>;
  // Added tokens that may begin with a given byte, longest first.
  using Starts = std::array<std::vector<AddedToken>, 256>;

  explicit Tokenizer(TokenizerData data);
  void encode_part(std::string_view text, size_t pass, Cache&, std::vector<int32_t>& out) const;
  void encode_words(std::string_view text, Cache&, std::vector<int32_t>& out) const;
  std::vector<int32_t> encode_word(const std::string& word) const;

  TokenizerData data_;
  std::array<int32_t, 256> byte_ids_;  // -1: no token
  std::array<Starts, 2> added_;        // not normalized, normalized
};

}  // namespace lockstep
