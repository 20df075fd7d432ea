#pragma once
// Just enough of Unicode for tokenizers: UTF-8 to code points and back, and what kind of character
// a code point is.
//
//   U+0000  .. U+007F      0xxxxxxx
//   U+0080  .. U+07FF      110xxxxx 10xxxxxx
//   U+0800  .. U+FFFF      1110xxxx 10xxxxxx 10xxxxxx          without the surrogates D800 .. DFFF
//   U+10000 .. U+10FFFF    11110xxx 10xxxxxx 10xxxxxx 10xxxxxx

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

namespace lockstep {

struct CodePoint {
  uint32_t code = 0;
  int bytes = 1;
  bool valid = true;  // false: this byte begins no character (its value is in `code`)
};
// The character that begins at text[at]. The shortest form only, as the standard demands: "/" in
// two bytes is no "/".
CodePoint decode_utf8(std::string_view text, size_t at);
std::string encode_utf8(uint32_t code);

// How many bytes the character that begins with this byte should have; 1 for a byte that begins
// none.
int utf8_length(unsigned char first);

enum class CharKind : uint8_t {
  Letter,  // \p{L}
  Number,  // \p{N}
  Space,   // \s: the property White_Space
  Other
};
CharKind kind_of(uint32_t code);

struct CodeRange {
  uint32_t first, last;
};
std::span<const CodeRange> unicode_letters();  // unicode_tables.cpp
std::span<const CodeRange> unicode_numbers();

}  // namespace lockstep
