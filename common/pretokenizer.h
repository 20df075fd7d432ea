#pragma once
// Before a tokenizer merges anything it cuts the text into words, and no token ever reaches across
// a cut. Tokenizers say how in the language of regular expressions; the three ways of the models
// that we read are small enough to write down as scanners, which is also what makes them fast:
//
//   GPT-2     '(?:[sdmt]|ll|ve|re) | ?\p{L}+ | ?\p{N}+ | ?[^\s\p{L}\p{N}]+ | \s+(?!\S) | \s+
//   SmolLM    every number (\p{N}) alone, what is between them as GPT-2
//   Llama 3   (?i:'s|'t|'re|'ve|'m|'ll|'d) | [^\r\n\p{L}\p{N}]?\p{L}+ | \p{N}{1,3}
//             | ?[^\s\p{L}\p{N}]+[\r\n]* | \s*[\r\n]+ | \s+(?!\S) | \s+
//
// The first alternative that fits wins, and takes as much as it can. \s+(?!\S) is white space that
// leaves the last character before a word to that word: "a   b" is "a", "  ", " b".
// Radford et al., "Language models are unsupervised multitask learners" (2019), section 2.2, says
// why: without the cuts, the vocabulary fills up with "dog.", "dog!" and "dog?".

#include <string_view>
#include <vector>

namespace lockstep {

enum class Splitter { Whole, Gpt2, SmolLM, Llama3 };  // Whole: the text is one word

// Consecutive pieces of `text`, which together are all of it. A byte that is no part of a UTF-8
// character counts as a character of its own, neither letter nor number nor space.
std::vector<std::string_view> split_words(std::string_view text, Splitter splitter);

}  // namespace lockstep
