#pragma once
// The text to learn from, as two streams of tokens in host memory: one to train on and one, never
// trained on, to validate with.
//
//   nothing given        the C++ standard library's headers; bytes are the tokens
//   a file, a directory  text; bytes are the tokens (vocabulary 256)
//   .bin files           llm.c shards of GPT-2 tokens (shards.h); also a directory of them
//
// A stream is read in disjoint windows: window w of length L feeds tokens wL .. wL+L-1 and predicts
// wL+1 .. wL+L, so the last target of one window is the first input of the next. Training and
// validation are separate streams before any window is cut, so no token of one can become a target
// of the other, whatever the length.

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

enum class Split : uint8_t { Train, Validation };

struct CorpusOptions {
  std::string data;      // file, directory or pattern; empty: the standard library's headers
  int64_t length = 256;  // of a window; each split must fill at least one
  double validation_fraction = 0.05;
};

class Corpus {
 public:
  explicit Corpus(const CorpusOptions& options);

  int64_t vocab() const { return vocab_; }  // 256 for bytes, 50257 for .bin
  int64_t tokens(Split split) const { return stream(split).size(); }
  int32_t token(Split split, int64_t position) const { return stream(split).at(position); }
  int64_t windows(Split split, int64_t length) const;    // full ones; what does not fill one
  int64_t left_over(Split split, int64_t length) const;  // is dropped: that many tokens
  int64_t files() const { return files_; }
  int64_t skipped_files() const { return skipped_; }  // of a directory: not text, or unreadable
  std::string description() const;                    // one line for the start of a run

  // Throws if the model has no embedding for some token; names the token, its place and its file.
  void check_vocabulary(int64_t model_vocab) const;

 private:
  struct Piece {
    std::filesystem::path file;
    int64_t first;    // its first token's position in the stream
    int64_t skipped;  // tokens of the file before that one, which belong to the other stream
  };
  // Two vectors, of which one is used: bytes take one byte each, not two.
  struct Stream {
    std::string bytes;
    std::vector<uint16_t> words;
    std::vector<Piece> pieces;
    int64_t size() const { return int64_t(bytes.size() + words.size()); }
    int32_t at(int64_t i) const {
      return bytes.empty() ? words[size_t(i)] : uint8_t(bytes[size_t(i)]);
    }
    void append(const std::filesystem::path& file, std::string_view content);
    void append(const std::filesystem::path& file, const std::vector<uint16_t>& content);
    Stream split_off(int64_t position);
  };

  const Stream& stream(Split split) const { return split == Split::Train ? train_ : validation_; }
  struct Text {
    std::filesystem::path file;
    std::string content;
  };
  void read_shards(const std::vector<std::filesystem::path>& files);
  void read_texts(const std::vector<std::filesystem::path>& files);
  std::vector<Text> read_all(const std::vector<std::filesystem::path>& files);
  void keep_the_end_for_validation();
  void require_a_window() const;

  CorpusOptions options_;
  std::string source_;  // for messages
  int64_t vocab_ = 256, files_ = 0, skipped_ = 0;
  Stream train_, validation_;
};

}  // namespace lockstep
