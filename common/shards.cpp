#include "common/shards.h"

#include <array>
#include <bit>
#include <fstream>

#include "common/check.h"
#include "common/files.h"
#include "common/json.h"

namespace lockstep {

static_assert(std::endian::native == std::endian::little, "the format is little-endian");

static constexpr int32_t kMagic = 20240520, kVersion = 1;
using Header = std::array<int32_t, 256>;

std::vector<uint16_t> read_bin(const std::filesystem::path& path) {
  std::ifstream in = open_to_read(path);
  const int64_t actual = int64_t(std::filesystem::file_size(path));
  Header header{};
  constexpr int64_t kHeaderBytes = sizeof header;
  require(actual >= kHeaderBytes, path.string(), " has ", actual,
          " bytes; a token file has a header of ", kHeaderBytes, " bytes, so it is cut short");
  in.read(reinterpret_cast<char*>(header.data()), kHeaderBytes);
  require(header[0] == kMagic, path.string(), " starts with the number ", header[0], ", not with ",
          kMagic, ": it is no llm.c file of 16-bit tokens");
  require(header[1] == kVersion, path.string(), " has version ", header[1],
          " of the format; this program reads version ", kVersion);
  const int64_t count = header[2], expected = kHeaderBytes + 2 * count;
  require(count > 0, path.string(), " says that it has ", count, " tokens; at least 1 is needed");
  require(actual == expected, path.string(), " says that it has ", count, " tokens, that is ",
          expected, " bytes with the header, but the file has ", actual);

  std::vector<uint16_t> tokens(static_cast<size_t>(count));
  in.read(reinterpret_cast<char*>(tokens.data()), 2 * count);
  require(bool(in), path.string(), " cannot be read to its end");
  return tokens;
}

void write_bin(const std::filesystem::path& path, const std::vector<int32_t>& tokens,
               int64_t vocab) {
  require(vocab >= 1 && vocab <= 65536, "a vocabulary of ", vocab,
          " does not fit the 16-bit tokens of ", path.string(), "; at most 65536 do");
  require(!tokens.empty() && tokens.size() <= size_t(INT32_MAX), path.string(), " cannot hold ",
          tokens.size(), " tokens; 1 to ", INT32_MAX, " fit into one file");
  std::vector<uint16_t> narrow;
  narrow.reserve(tokens.size());
  for (int32_t token : tokens) {
    require(token >= 0 && token < vocab, "token ", token, " at position ", narrow.size(), " of ",
            path.string(), " lies outside of the vocabulary (0 to ", vocab - 1, ")");
    narrow.push_back(uint16_t(token));
  }
  Header header{kMagic, kVersion, int32_t(tokens.size())};
  write_file(path, {{reinterpret_cast<const char*>(header.data()), sizeof header},
                    {reinterpret_cast<const char*>(narrow.data()), 2 * narrow.size()}});
}

bool looks_like_a_shard(const std::filesystem::path& path) {
  int32_t magic = 0;
  std::ifstream in = open_to_read(path);
  return in.read(reinterpret_cast<char*>(&magic), sizeof magic) && magic == kMagic;
}

}  // namespace lockstep
