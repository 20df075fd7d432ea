#include "common/tokenizer.h"

#include <algorithm>

#include "common/check.h"

namespace lockstep {

static TokenizerData byte_data() {
  TokenizerData data;
  for (int b = 0; b < 256; ++b) {
    data.tokens.push_back(std::string(1, char(b)));
    data.ids[data.tokens.back()] = b;
  }
  return data;
}

Tokenizer Tokenizer::bytes() { return Tokenizer(byte_data()); }

Tokenizer::Tokenizer(const std::filesystem::path& path) : Tokenizer(read_tokenizer(path)) {}

Tokenizer::Tokenizer(TokenizerData data) : data_(std::move(data)) {
  for (int b = 0; b < 256; ++b) {
    auto found = data_.ids.find(std::string(1, char(b)));
    byte_ids_[size_t(b)] = found != data_.ids.end() ? found->second : -1;
  }
  for (const AddedToken& token : data_.added) {
    Starts& starts = added_[token.normalized ? 1 : 0];
    starts[static_cast<unsigned char>(token.content[0])].push_back(token);
  }
  for (Starts& starts : added_)
    for (std::vector<AddedToken>& tokens : starts)
      std::stable_sort(tokens.begin(), tokens.end(), [](const AddedToken& a, const AddedToken& b) {
        return a.content.size() > b.content.size();
      });
}

std::vector<int32_t> Tokenizer::encode(std::string_view text) const {
  std::vector<int32_t> out;
  Cache cache;  // most words of a text come more than once
  encode_part(text, 0, cache, out);
  return out;
}

// Pass 0 and 1 find added tokens and leave what is between them to the next pass.
void Tokenizer::encode_part(std::string_view text, size_t pass, Cache& cache,
                            std::vector<int32_t>& out) const {
  if (pass == added_.size()) return encode_words(text, cache, out);
  size_t begin = 0, at = 0;
  while (at < text.size()) {
    const AddedToken* found = nullptr;
    for (const AddedToken& token : added_[pass][static_cast<unsigned char>(text[at])])
      if (!found && text.substr(at).starts_with(token.content)) found = &token;
    if (!found) {
      ++at;
      continue;
    }
    encode_part(text.substr(begin, at - begin), pass + 1, cache, out);
    out.push_back(found->id);
    begin = at += found->content.size();
  }
  encode_part(text.substr(begin), pass + 1, cache, out);
}

void Tokenizer::encode_words(std::string_view text, Cache& cache, std::vector<int32_t>& out) const {
  if (text.empty()) return;
  std::string spaced;
  if (data_.prefix_space && !text.starts_with(' ')) {
    spaced = " ";
    spaced += text;
    text = spaced;
  }
  for (std::string_view word : split_words(text, data_.splitter)) {
    auto [place, is_new] = cache.try_emplace(std::string(word));
    if (is_new) place->second = encode_word(place->first);
    out.insert(out.end(), place->second.begin(), place->second.end());
  }
}

std::vector<int32_t> Tokenizer::encode_word(const std::string& word) const {
  if (data_.ignore_merges)
    if (auto whole = data_.ids.find(word); whole != data_.ids.end()) return {whole->second};
  std::vector<int32_t> tokens;
  for (char c : word) {
    int byte = static_cast<unsigned char>(c);
    require(byte_ids_[size_t(byte)] >= 0, "this tokenizer has no token for the byte ", byte,
            " of the text");
    tokens.push_back(byte_ids_[size_t(byte)]);
  }
  return data_.merges.apply(std::move(tokens));
}

bool Tokenizer::has(int32_t id) const {
  return id >= 0 && id < vocab_size() && !data_.tokens[size_t(id)].empty();
}

std::string Tokenizer::decode(const std::vector<int32_t>& ids) const {
  std::string out;
  for (int32_t id : ids) {
    require(has(id), "this tokenizer has no token ", id, "; its vocabulary ends at ",
            vocab_size() - 1);
    out += data_.tokens[size_t(id)];
  }
  return out;
}

std::optional<int32_t> Tokenizer::special(std::string_view name) const {
  for (const AddedToken& token : data_.added)
    if (token.content == name) return token.id;
  return std::nullopt;
}

}  // namespace lockstep
