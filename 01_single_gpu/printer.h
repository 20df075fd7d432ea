#pragma once
// Shows text while it is generated. A token may end in the middle of a character, and a model may
// write any byte: half characters wait for their other half, and what could harm a terminal (escape
// sequences, broken UTF-8) becomes '?'.

#include <cstdio>
#include <string>

#include "common/unicode.h"

namespace lockstep {

class Printer {
 public:
  explicit Printer(std::FILE* out) : out_(out) {}
  void print(const std::string& bytes) {
    waiting_ += bytes;
    show(false);
  }
  void finish() { show(true); }  // nothing more comes: half a character stays half

 private:
  void show(bool all) {
    size_t at = 0;
    while (at < waiting_.size()) {
      size_t length = size_t(utf8_length(static_cast<unsigned char>(waiting_[at])));
      if (!all && at + length > waiting_.size()) break;
      CodePoint c = decode_utf8(waiting_, at);
      bool control = c.code < 32 || (c.code >= 0x7f && c.code < 0xa0);
      bool harmless = c.valid && (!control || c.code == '\n' || c.code == '\t');
      std::string shown = harmless ? waiting_.substr(at, size_t(c.bytes)) : "?";
      std::fwrite(shown.data(), 1, shown.size(), out_);
      at += size_t(c.bytes);
    }
    waiting_.erase(0, at);
    std::fflush(out_);
  }

  std::FILE* out_;
  std::string waiting_;
};

}  // namespace lockstep
