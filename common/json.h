#pragma once
// JSON from files that strangers wrote: config.json, safetensors headers, shard indexes. The plain
// parser keeps the last of two equal keys, which would let a file show one thing to us and another
// to the next reader; these functions refuse it, and deep nesting, and everything else that is not
// JSON, in one sentence that names the source.

#include <filesystem>
#include <nlohmann/json_fwd.hpp>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

nlohmann::json parse_json(std::string_view content, const std::string& source);
nlohmann::json read_json(const std::filesystem::path& path);  // an object

// Replaces path in one step: a reader sees the old file or the new one, never half of it. The
// pieces are written one behind the other.
void write_file(const std::filesystem::path& path, const std::vector<std::string_view>& pieces);

}  // namespace lockstep
