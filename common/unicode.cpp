#include "common/unicode.h"

#include <algorithm>

namespace lockstep {

int utf8_length(unsigned char first) {
  if (first < 0xc2)
    return 1;  // ASCII, or a byte from inside of a character; C0, C1: too long a form
  if (first < 0xe0) return 2;
  if (first < 0xf0) return 3;
  return first < 0xf5 ? 4 : 1;  // F5 and above would lie beyond 10FFFF
}

CodePoint decode_utf8(std::string_view text, size_t at) {
  auto byte = [&](size_t i) { return uint32_t(static_cast<unsigned char>(text[i])); };
  uint32_t first = byte(at);
  if (first < 0x80) return {first, 1, true};
  const CodePoint broken{first, 1, false};
  int length = utf8_length(static_cast<unsigned char>(first));
  if (length == 1 || at + size_t(length) > text.size()) return broken;
  uint32_t code = first & (0xffu >> (length + 1));
  for (size_t i = at + 1; i < at + size_t(length); ++i) {
    if ((byte(i) & 0xc0) != 0x80) return broken;
    code = code << 6 | (byte(i) & 0x3f);
  }
  constexpr uint32_t kSmallest[] = {0, 0, 0x80, 0x800, 0x10000};
  bool surrogate = code >= 0xd800 && code <= 0xdfff;
  if (code < kSmallest[length] || code > 0x10ffff || surrogate) return broken;
  return {code, length, true};
}

std::string encode_utf8(uint32_t code) {
  auto tail = [&](int shift) { return char(0x80 | (code >> shift & 0x3f)); };
  if (code < 0x80) return {char(code)};
  if (code < 0x800) return {char(0xc0 | code >> 6), tail(0)};
  if (code < 0x10000) return {char(0xe0 | code >> 12), tail(6), tail(0)};
  return {char(0xf0 | code >> 18), tail(12), tail(6), tail(0)};
}

static bool contains(std::span<const CodeRange> ranges, uint32_t code) {
  auto after = std::upper_bound(ranges.begin(), ranges.end(), code,
                                [](uint32_t c, const CodeRange& r) { return c < r.first; });
  return after != ranges.begin() && code <= (after - 1)->last;
}

static bool is_space(uint32_t c) {
  return (c >= 0x9 && c <= 0xd) || c == 0x20 || c == 0x85 || c == 0xa0 || c == 0x1680 ||
         (c >= 0x2000 && c <= 0x200a) || c == 0x2028 || c == 0x2029 || c == 0x202f || c == 0x205f ||
         c == 0x3000;
}

CharKind kind_of(uint32_t code) {
  if (code < 0x80) {  // most of most texts
    uint32_t lower = code | 0x20;
    if (lower >= 'a' && lower <= 'z') return CharKind::Letter;
    if (code >= '0' && code <= '9') return CharKind::Number;
    return is_space(code) ? CharKind::Space : CharKind::Other;
  }
  if (is_space(code)) return CharKind::Space;
  if (contains(unicode_letters(), code)) return CharKind::Letter;
  return contains(unicode_numbers(), code) ? CharKind::Number : CharKind::Other;
}

}  // namespace lockstep
