#include "common/corpus.h"

#include <algorithm>
#include <cmath>

#include "common/check.h"
#include "common/shards.h"
#include "common/text_files.h"

namespace lockstep {

namespace fs = std::filesystem;

// ---- Streams

void Corpus::Stream::append(const fs::path& file, std::string_view content) {
  pieces.push_back({file, size(), 0});
  bytes += content;
}

void Corpus::Stream::append(const fs::path& file, const std::vector<uint16_t>& content) {
  pieces.push_back({file, size(), 0});
  words.insert(words.end(), content.begin(), content.end());
}

// Keeps the tokens before `position` and returns the others.
Corpus::Stream Corpus::Stream::split_off(int64_t position) {
  Stream tail;
  auto later = std::upper_bound(pieces.begin(), pieces.end(), position,
                                [](int64_t at, const Piece& piece) { return at < piece.first; });
  for (auto it = later == pieces.begin() ? later : later - 1; it != pieces.end(); ++it) {
    int64_t cut = std::max<int64_t>(0, position - it->first);
    tail.pieces.push_back({it->file, it->first + cut - position, it->skipped + cut});
  }
  std::erase_if(pieces, [&](const Piece& piece) { return piece.first >= position; });
  if (!bytes.empty()) {
    tail.bytes = bytes.substr(size_t(position));
    bytes.resize(size_t(position));
  } else {
    tail.words.assign(words.begin() + position, words.end());
    words.resize(size_t(position));
  }
  return tail;
}

// ---- Reading

static bool is_shard(const fs::path& file) { return file.extension() == ".bin"; }

// Where shards lie, only they are read; a damaged one among them is refused later, by name. Of a
// directory only its own files count, and only if at least one begins as a shard does or all are
// called .bin: beside a text, anything may have that name.
static std::vector<fs::path> shards_among(const std::vector<fs::path>& files,
                                          const fs::path& what) {
  if (!fs::is_directory(what)) {
    std::vector<fs::path> named = files;
    std::erase_if(named, [](const fs::path& file) { return !is_shard(file); });
    return named;
  }
  std::vector<fs::path> own, out;
  for (const fs::path& file : files)
    if (file.parent_path() == what) own.push_back(file);
  for (const fs::path& file : own)
    if (is_shard(file)) out.push_back(file);
  bool meant = out.size() == own.size() || std::any_of(out.begin(), out.end(), looks_like_a_shard);
  return meant ? out : std::vector<fs::path>{};
}

Corpus::Corpus(const CorpusOptions& options) : options_(options) {
  require(options.length >= 1, "windows of ", options.length,
          " tokens were asked for; the length must be at least 1");
  require(options.validation_fraction > 0 && options.validation_fraction <= 0.5,
          "the validation fraction is ", options.validation_fraction,
          "; it must be more than 0 and at most 0.5");
  fs::path what = options.data.empty() ? standard_library_directory(LOCKSTEP_CXX_COMPILER)
                                       : fs::path(options.data);
  if (!what.has_filename()) what = what.parent_path();  // "text/" is "text"
  source_ = what.string();

  std::vector<fs::path> files = list_files(what);
  if (options.data.empty()) files = without_target_specific(std::move(files), what);
  std::vector<fs::path> shards = shards_among(files, what);
  if (!shards.empty()) {
    read_shards(shards);
  } else {
    read_texts(files);
  }
  require_a_window();
}

void Corpus::keep_the_end_for_validation() {
  const int64_t all = train_.size(), window = options_.length + 1;
  require(all >= 2 * window, source_, " has ", all, " tokens; training and validation each need a ",
          "window of ", window, " (length ", options_.length, " + 1), ", 2 * window,
          " in all: name more text, or a shorter length");
  int64_t share = int64_t(std::ceil(double(all) * options_.validation_fraction));
  validation_ = train_.split_off(all - std::max(share, window));
}

static bool is_for_validation(const fs::path& shard) {
  std::string name = "_" + shard.stem().string() + "_";
  return name.find("_val_") != std::string::npos;
}

// llm.c names its files ..._train_000001.bin and ..._val_000000.bin. Without such names the end of
// the tokens is kept for validation.
void Corpus::read_shards(const std::vector<fs::path>& files) {
  vocab_ = kGpt2Vocab;
  files_ = int64_t(files.size());
  const int64_t named = std::count_if(files.begin(), files.end(), is_for_validation);
  const bool by_name = named > 0 && named < files_;
  for (const fs::path& file : files) {
    Stream& to = by_name && is_for_validation(file) ? validation_ : train_;
    to.append(file, read_bin(file));
  }
  if (!by_name) keep_the_end_for_validation();
}

// Of many files every 20th (for 5 %) is kept for validation: a sorted list changes its character on
// the way, so its end does not stand for the whole. Of few files, or where that would leave one
// side too short, the end of the text is kept.
void Corpus::read_texts(const std::vector<fs::path>& files) {
  std::vector<Text> texts = read_all(files);
  files_ = int64_t(texts.size());
  require(files_ > 0, source_, " holds no text: each of its ", skipped_,
          " files contains bytes of zero or cannot be read");
  const int64_t stride = std::llround(1 / options_.validation_fraction);
  auto is_validation = [&](size_t i) { return int64_t(i) % stride == stride - 1; };
  int64_t train = 0, validation = 0;
  for (size_t i = 0; i < texts.size(); ++i)
    (is_validation(i) ? validation : train) += int64_t(texts[i].content.size());
  const bool by_file = std::min(train, validation) > options_.length;

  train_.bytes.reserve(size_t(by_file ? train : train + validation));
  for (size_t i = 0; i < texts.size(); ++i) {
    (by_file && is_validation(i) ? validation_ : train_).append(texts[i].file, texts[i].content);
    texts[i].content = {};  // the text is in memory once, not twice
  }
  if (!by_file) keep_the_end_for_validation();
}

// What a directory holds beside text is skipped and counted; a file that was named must be text.
std::vector<Corpus::Text> Corpus::read_all(const std::vector<fs::path>& files) {
  std::vector<Text> out;
  const bool named = files.size() == 1 && files[0] == source_;
  for (const fs::path& file : files) {
    if (!named && !is_readable(file)) {
      ++skipped_;
      continue;
    }
    std::string content = read_text(file);
    if (looks_binary(content)) {
      require(!named, source_, " is not text: byte ", content.find('\0'), " is a zero");
      ++skipped_;
      continue;
    }
    out.push_back({file, std::move(content)});
  }
  return out;
}

// ---- Asking

int64_t Corpus::windows(Split split, int64_t length) const {
  return std::max<int64_t>(0, tokens(split) - 1) / length;
}

int64_t Corpus::left_over(Split split, int64_t length) const {
  return std::max<int64_t>(0, tokens(split) - 1) % length;
}

void Corpus::require_a_window() const {
  for (Split split : {Split::Train, Split::Validation})
    require(windows(split, options_.length) > 0, "the ",
            split == Split::Train ? "training" : "validation", " part of ", source_, " has ",
            tokens(split), " tokens; one window of length ", options_.length, " needs ",
            options_.length + 1, ": name more text, or a shorter length");
}

std::string Corpus::description() const {
  std::string out = text(files_, files_ == 1 ? " file, " : " files of ", source_);
  if (skipped_ > 0) out += text(" (", skipped_, " more are not text)");
  return out + text(": ", train_.size(), " tokens to train on, ", validation_.size(),
                    " to validate with, vocabulary ", vocab_);
}

void Corpus::check_vocabulary(int64_t model_vocab) const {
  if (model_vocab >= (vocab_ == 256 ? 256 : 65536)) return;  // no stored token can be larger
  for (Split split : {Split::Train, Split::Validation}) {
    const Stream& s = stream(split);
    for (const Piece& piece : s.pieces) {
      const int64_t end = &piece == &s.pieces.back() ? s.size() : (&piece + 1)->first;
      for (int64_t i = piece.first; i < end; ++i)
        require(s.at(i) < model_vocab, "token ", s.at(i), " at position ",
                i - piece.first + piece.skipped, " of ", piece.file.string(),
                " is outside of the model's vocabulary of ", model_vocab, " tokens (0 to ",
                model_vocab - 1, ")");
    }
  }
}

}  // namespace lockstep
