#include "common/pretokenizer.h"

#include <algorithm>

#include "common/unicode.h"

namespace lockstep {

namespace {

struct Character {
  size_t begin;  // its first byte
  uint32_t code;
  CharKind kind;
};

// The characters [.., end) of a text, and the questions that the patterns ask about them. Behind
// the end there is nothing, and nothing is of no kind.
struct Scan {
  const std::vector<Character>& characters;
  size_t end;

  bool is(size_t i, CharKind kind) const { return i < end && characters[i].kind == kind; }
  uint32_t code(size_t i) const { return i < end ? characters[i].code : 0; }
  bool is_newline(size_t i) const { return code(i) == '\r' || code(i) == '\n'; }
  // The first place from i on that is not of this kind; that is no newline.
  size_t run(size_t i, CharKind kind) const {
    while (is(i, kind)) ++i;
    return i;
  }
  size_t newlines(size_t i) const {
    while (is_newline(i)) ++i;
    return i;
  }
};

}  // namespace

// The end of 's 'd 'm 't 'll 've 're at i, or i. Of all characters only the long s (U+017F) equals
// an ASCII letter of these when case is ignored.
static size_t contraction(const Scan& s, size_t i, bool any_case) {
  if (s.code(i) != '\'') return i;
  auto letter = [&](size_t at) {
    uint32_t c = s.code(at);
    if (!any_case) return c;
    if (c == 0x17f) return uint32_t('s');
    return c >= 'A' && c <= 'Z' ? c + ('a' - 'A') : c;
  };
  uint32_t a = letter(i + 1), b = letter(i + 2);
  if (a == 's' || a == 'd' || a == 'm' || a == 't') return i + 2;
  bool two = (a == 'l' && b == 'l') || (a == 'v' && b == 'e') || (a == 'r' && b == 'e');
  return two ? i + 3 : i;
}

// \s+(?!\S) | \s+
static size_t white_space(const Scan& s, size_t i) {
  size_t last = s.run(i, CharKind::Space);
  bool word_follows = last < s.end;
  return word_follows && last > i + 1 ? last - 1 : last;
}

// Each of the next two: the end of the word that begins at i.
static size_t gpt2_word(const Scan& s, size_t i) {
  if (size_t end = contraction(s, i, false); end > i) return end;
  size_t first = s.code(i) == ' ' ? i + 1 : i;
  for (CharKind kind : {CharKind::Letter, CharKind::Number, CharKind::Other})
    if (s.is(first, kind)) return s.run(first, kind);
  return white_space(s, i);
}

static size_t llama3_word(const Scan& s, size_t i) {
  if (size_t end = contraction(s, i, true); end > i) return end;
  bool may_lead = !s.is_newline(i) && !s.is(i, CharKind::Number);
  if (s.is(i, CharKind::Letter) || (may_lead && s.is(i + 1, CharKind::Letter)))
    return s.run(i + 1, CharKind::Letter);
  if (s.is(i, CharKind::Number)) return std::min(s.run(i, CharKind::Number), i + 3);
  size_t first = s.code(i) == ' ' ? i + 1 : i;
  if (s.is(first, CharKind::Other)) return s.newlines(s.run(first, CharKind::Other));
  for (size_t last = s.run(i, CharKind::Space); last > i; --last)
    if (s.is_newline(last - 1)) return last;  // \s*[\r\n]+ ends at the last newline
  return white_space(s, i);
}

std::vector<std::string_view> split_words(std::string_view text, Splitter splitter) {
  if (splitter == Splitter::Whole) return {text};
  std::vector<Character> characters;
  for (size_t at = 0; at < text.size();) {
    CodePoint c = decode_utf8(text, at);
    characters.push_back({at, c.code, c.valid ? kind_of(c.code) : CharKind::Other});
    at += size_t(c.bytes);
  }
  std::vector<std::string_view> words;
  auto begin = [&](size_t i) { return i < characters.size() ? characters[i].begin : text.size(); };
  for (size_t i = 0; i < characters.size();) {
    Scan s{characters, characters.size()};
    if (splitter == Splitter::SmolLM) {  // what lies beyond the next number is not seen
      s.end = i;
      while (s.end < characters.size() && characters[s.end].kind != CharKind::Number) ++s.end;
      if (s.end == i) ++s.end;
    }
    while (i < s.end) {
      size_t next = splitter == Splitter::Llama3 ? llama3_word(s, i) : gpt2_word(s, i);
      words.push_back(text.substr(begin(i), begin(next) - begin(i)));
      i = next;
    }
  }
  return words;
}

}  // namespace lockstep
