// Reading tokenizer.json. Everything in it either has a place in TokenizerData, or changes nothing
// for the ids of a text, or is refused with the name of the setting.

#include <algorithm>
#include <nlohmann/json.hpp>
#include <set>

#include "common/check.h"
#include "common/json.h"
#include "common/tokenizer.h"
#include "common/unicode.h"

namespace lockstep {

using Json = nlohmann::json;

// Llama 3's pattern, letter for letter as its tokenizer.json has it.
static constexpr const char* kLlama3Pattern =
    R"((?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|)"
    R"( ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+)";

// No model has more tokens; a file that claims more would make us ask for that much memory.
static constexpr int64_t kMostTokens = 1 << 24;

// ---- Access with sentences. `source` names the file and the place in it.

static bool has(const Json& json, const char* key) {
  return json.is_object() && json.contains(key) && !json[key].is_null();
}
static const Json& at(const Json& json, const char* key, const std::string& source) {
  require(has(json, key), source, " has no ", key);
  return json[key];
}
static std::string word(const Json& json, const char* key, const std::string& source) {
  const Json& value = at(json, key, source);
  require(value.is_string(), source, ": ", key, " is ", value.dump(), "; text was expected");
  return value.get<std::string>();
}
static bool flag(const Json& json, const char* key, bool fallback, const std::string& source) {
  if (!has(json, key)) return fallback;
  require(json[key].is_boolean(), source, ": ", key, " is ", json[key].dump(),
          "; true or false was expected");
  return json[key].get<bool>();
}
static int32_t token_id(const Json& value, const std::string& what) {
  bool valid = value.is_number_integer() && value >= 0 && value < kMostTokens;
  require(valid, what, " has the id ", value.dump(), "; ids are whole numbers from 0 to ",
          kMostTokens - 1);
  return value.get<int32_t>();
}
static std::string type_of(const Json& part) {
  return has(part, "type") && part["type"].is_string() ? part["type"].get<std::string>() : "";
}
// null, false, 0, "" and {} ask for nothing.
static bool asks_for_nothing(const Json& v) {
  return v.is_null() || v == false || v == 0 || (v.is_string() && v == "") ||
         (v.is_structured() && v.empty());
}
static void refuse_other_than(const Json& json, const std::set<std::string>& known,
                              const std::string& source) {
  for (const auto& [key, value] : json.items())
    require(known.contains(key) || asks_for_nothing(value), source, ": ", key, " is ",
            value.dump().substr(0, 80), "; this program has no such setting");
}

// ---- How the text is cut

static bool is_byte_level(const Json& part, bool use_regex, const std::string& source) {
  if (type_of(part) != "ByteLevel") return false;
  refuse_other_than(part, {"type", "add_prefix_space", "trim_offsets", "use_regex"}, source);
  return flag(part, "use_regex", true, source) == use_regex;
}
static bool is_digits(const Json& part, const std::string& source) {
  return type_of(part) == "Digits" && flag(part, "individual_digits", false, source);
}
static bool is_llama3_split(const Json& part) {
  return type_of(part) == "Split" && part.value("behavior", Json()) == "Isolated" &&
         part.value("invert", Json(false)) == false &&
         part.value("pattern", Json()) == Json{{"Regex", kLlama3Pattern}};
}

static Splitter splitter_of(const Json& part, const std::string& source) {
  if (is_byte_level(part, true, source)) return Splitter::Gpt2;
  if (type_of(part) == "Sequence" && has(part, "pretokenizers")) {
    const Json& parts = part["pretokenizers"];
    if (parts.is_array() && parts.size() == 2 &&
        !flag(parts[1], "add_prefix_space", true, source)) {
      if (is_digits(parts[0], source) && is_byte_level(parts[1], true, source))
        return Splitter::SmolLM;
      if (is_llama3_split(parts[0]) && is_byte_level(parts[1], false, source))
        return Splitter::Llama3;
    }
  }
  fail(text(source, " is ", part.dump().substr(0, 160),
            "; this program has those of GPT-2 (ByteLevel), SmolLM (individual Digits, ByteLevel) "
            "and Llama 3 (Split by its pattern, ByteLevel), all three letter for letter"));
}

// ---- Tokens and merges

// Every byte as one printable character: those that are printable in Latin-1 stand for themselves,
// the others for U+0100, U+0101, ... in their order. The inverse of that; -1 for other characters.
static int byte_of_character(uint32_t code) {
  auto stands_for_itself = [](uint32_t b) {
    return (b >= 33 && b <= 126) || (b >= 161 && b <= 172) || (b >= 174 && b <= 255);
  };
  if (code < 256) return stands_for_itself(code) ? int(code) : -1;
  uint32_t others = 256;
  for (uint32_t b = 0; b < 256; ++b)
    if (!stands_for_itself(b) && others++ == code) return int(b);
  return -1;
}

namespace {
class ByteMap {
 public:
  ByteMap() {
    for (uint32_t code = 0; code < bytes_.size(); ++code) bytes_[code] = byte_of_character(code);
  }
  // Nothing for a token with a character that stands for no byte, like "<a b>": merges never make
  // such a token, and it is written as it is.
  std::optional<std::string> operator()(const std::string& token) const {
    std::string out;
    for (size_t i = 0; i < token.size();) {
      CodePoint c = decode_utf8(token, i);
      if (c.code >= bytes_.size() || bytes_[c.code] < 0) return std::nullopt;
      out += char(bytes_[c.code]);
      i += size_t(c.bytes);
    }
    return out;
  }

 private:
  std::array<int, 512> bytes_;
};
}  // namespace

static void place(TokenizerData& data, int32_t id, const std::string& content,
                  const std::string& source) {
  if (data.tokens.size() <= size_t(id)) data.tokens.resize(size_t(id) + 1);
  std::string& old = data.tokens[size_t(id)];
  require(old.empty() || old == content, source, " gives the id ", id, " to \"", old,
          "\" and to \"", content, "\"");
  old = content;
}

using Vocabulary = std::unordered_map<std::string, int32_t>;  // as the file writes the tokens

static Vocabulary read_vocabulary(const Json& model, TokenizerData& data,
                                  const std::string& source) {
  const Json& vocab = at(model, "vocab", source);
  require(vocab.is_object() && !vocab.empty(), source, ": vocab is no table of tokens and ids");
  Vocabulary ids;
  ByteMap to_bytes;
  for (const auto& [token, value] : vocab.items()) {
    int32_t id = token_id(value, source + ": the token \"" + token + "\"");
    std::optional<std::string> bytes = to_bytes(token);
    place(data, id, bytes.value_or(token), source);
    if (bytes) data.ids[*bytes] = id;
    ids[token] = id;
  }
  return ids;
}

static void read_merges(const Json& model, const Vocabulary& ids, TokenizerData& data,
                        const std::string& source) {
  const Json& merges = at(model, "merges", source);
  require(merges.is_array(), source, ": merges is no list");
  int32_t rank = 0;
  for (const Json& merge : merges) {
    std::string left, right;
    if (merge.is_array() && merge.size() == 2 && merge[0].is_string() && merge[1].is_string()) {
      left = merge[0], right = merge[1];
    } else if (merge.is_string()) {  // how files were written until 2024
      std::string both = merge;
      size_t space = std::min(both.find(' '), both.size());
      left = both.substr(0, space);
      right = both.substr(std::min(space + 1, both.size()));
    }
    require(!left.empty() && !right.empty() && right.find(' ') == right.npos, source, ": merge ",
            rank, " is ", merge.dump(), "; \"a b\" or [\"a\", \"b\"] was expected");
    for (const std::string& token : {left, right, left + right})
      require(ids.contains(token), source, ": merge ", rank, " needs the token \"", token,
              "\", which is not in vocab");
    data.merges.add(ids.at(left), ids.at(right), rank++, ids.at(left + right));
  }
}

static Vocabulary read_model(const Json& model, TokenizerData& data, const std::string& source) {
  std::string type = type_of(model);
  bool is_bpe = type == "BPE" || (type.empty() && has(model, "merges"));  // GPT-2's has no type
  require(is_bpe, source, " is of type \"", type, "\"; this program reads \"BPE\"");
  // Without a token for some byte we refuse the text that holds it, so unk_token is never used.
  refuse_other_than(model, {"type", "vocab", "merges", "ignore_merges", "unk_token", "fuse_unk"},
                    source);
  data.ignore_merges = flag(model, "ignore_merges", false, source);
  Vocabulary ids = read_vocabulary(model, data, source);
  read_merges(model, ids, data, source);
  return ids;
}

// Hugging Face gives an added token the id that it has in vocab, or the next free one, and takes no
// notice of the id in the file. In every sound file they are the same.
static void read_added_tokens(const Json& json, const Vocabulary& ids, TokenizerData& data,
                              const std::string& source) {
  if (!has(json, "added_tokens")) return;
  int32_t next = int32_t(ids.size());
  for (const Json& token : json["added_tokens"]) {
    AddedToken added;
    added.content = word(token, "content", source + ": an added token");
    const std::string what = source + ": the added token \"" + added.content + "\"";
    require(!added.content.empty(), what, " has no characters");
    added.id = token_id(at(token, "id", what), what);
    auto known = ids.find(added.content);
    int32_t place_in_order = known != ids.end() ? known->second : next++;
    require(added.id == place_in_order, what, " has the id ", added.id, ", but its place is ",
            place_in_order);
    added.normalized = flag(token, "normalized", false, what);
    for (const char* key : {"lstrip", "rstrip", "single_word"})
      require(!flag(token, key, false, what), what, " asks for ", key,
              ", which this program does not have");
    place(data, added.id, added.content, source);
    data.added.push_back(added);
  }
}

// ---- What stands before a text

static void read_template(const Json& part, TokenizerData& data, const std::string& source) {
  bool text_came = false;
  for (const Json& piece : at(part, "single", source)) {
    require(!text_came, source,
            " puts tokens behind a text; this program can only put some before");
    text_came = has(piece, "Sequence");
    if (text_came) continue;
    std::string name = word(at(piece, "SpecialToken", source), "id", source);
    const Json& special = at(at(part, "special_tokens", source), name.c_str(), source);
    for (const Json& id : at(special, "ids", source))
      data.begin.push_back(token_id(id, source + ": \"" + name + "\""));
  }
}

static void read_post_processor(const Json& part, TokenizerData& data, const std::string& source) {
  std::string type = type_of(part);
  if (type == "ByteLevel") return;  // it moves offsets, which we do not give
  if (type == "TemplateProcessing") return read_template(part, data, source);
  require(type == "Sequence" && has(part, "processors"), source, " is of type \"", type,
          "\"; this program has ByteLevel and TemplateProcessing");
  for (const Json& inner : part["processors"]) read_post_processor(inner, data, source);
}

TokenizerData read_tokenizer(const std::filesystem::path& path) {
  const Json json = read_json(path);
  const std::string file = path.string();
  TokenizerData data;
  refuse_other_than(
      json, {"version", "added_tokens", "pre_tokenizer", "post_processor", "decoder", "model"},
      file);
  const Json& splitter = at(json, "pre_tokenizer", file);
  data.splitter = splitter_of(splitter, file + ": pre_tokenizer");
  data.prefix_space = data.splitter == Splitter::Gpt2 &&
                      flag(splitter, "add_prefix_space", true, file + ": pre_tokenizer");
  std::string decoder = type_of(at(json, "decoder", file));
  require(decoder == "ByteLevel", file, ": decoder is of type \"", decoder,
          "\"; this program has ByteLevel");
  Vocabulary ids = read_model(at(json, "model", file), data, file + ": model");
  read_added_tokens(json, ids, data, file);
  if (has(json, "post_processor"))
    read_post_processor(json["post_processor"], data, file + ": post_processor");
  return data;
}

}  // namespace lockstep
