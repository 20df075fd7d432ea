#pragma once
// Token files of llm.c, version 1: 256 little-endian int32 (magic number, version, token count,
// then zeros), and the tokens as unsigned 16-bit numbers. GPT-2's vocabulary of 50257 fits. Format:
// https://github.com/karpathy/llm.c, dev/data/data_common.py.

#include <cstdint>
#include <filesystem>
#include <vector>

namespace lockstep {

inline constexpr int64_t kGpt2Vocab = 50257;

// Refuses a file whose size is not exactly what its header says.
std::vector<uint16_t> read_bin(const std::filesystem::path& path);

// Refuses tokens outside of the vocabulary, and a vocabulary that 16 bits cannot hold.
void write_bin(const std::filesystem::path& path, const std::vector<int32_t>& tokens,
               int64_t vocab);

// Does the file begin as a shard does? Somewhere, anything may be called .bin.
bool looks_like_a_shard(const std::filesystem::path& path);

}  // namespace lockstep
