#include "01_single_gpu/language.h"

#include <sstream>

#include "common/check.h"

namespace lockstep {

Language find_language(const std::filesystem::path& file, const std::filesystem::path& beside,
                       int64_t model_vocab) {
  std::filesystem::path path = file;
  bool is_beside = !beside.empty() && std::filesystem::exists(beside / "tokenizer.json");
  if (path.empty() && is_beside) path = beside / "tokenizer.json";
  if (path.empty()) {
    if (model_vocab == 256) return {Tokenizer::bytes(), "bytes"};
    return {};
  }
  Language language{Tokenizer(path), path.string()};
  int64_t vocab = language.tokenizer->vocab_size();
  require(vocab <= model_vocab, path.string(), " has ", vocab, " tokens, the model only ",
          model_vocab, ": it is another model's tokenizer");
  return language;
}

static std::vector<int32_t> read_ids(const std::string& text) {
  std::istringstream in(text);
  std::vector<int32_t> ids;
  for (std::string word; in >> word;) {
    bool number = word.size() < 10 && word.find_first_not_of("0123456789") == word.npos;
    require(number, "the prompt must be a list of token ids, not \"", word,
            "\": this model came without a tokenizer (--tokenizer FILE gives it one)");
    ids.push_back(std::stoi(word));
  }
  return ids;
}

std::vector<int32_t> Language::read(const std::string& text) const {
  if (!tokenizer) return read_ids(text);
  std::vector<int32_t> ids = tokenizer->begin(), words = tokenizer->encode(text);
  ids.insert(ids.end(), words.begin(), words.end());
  return ids;
}

std::string Language::write(int32_t id) const {
  if (!tokenizer) return text(id, " ");
  return tokenizer->has(id) ? tokenizer->decode({id}) : text("<", id, ">");
}

}  // namespace lockstep
