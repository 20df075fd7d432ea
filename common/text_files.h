#pragma once
// Where text comes from when the reader has downloaded nothing: any file, any directory, and the
// headers of the C++ standard library, which lie on every machine that can build this program.

#include <filesystem>
#include <string>
#include <string_view>
#include <vector>

namespace lockstep {

// The directory that `#include <vector>` reads from, as the compiler itself reports it.
std::filesystem::path standard_library_directory(const std::string& compiler);

// Without the part that differs between processors, which some systems keep inside of the library's
// directory: the default text is the same on all of them.
std::vector<std::filesystem::path> without_target_specific(std::vector<std::filesystem::path> files,
                                                           const std::filesystem::path& library);

// What --data names: the file itself, all files below a directory, or what a pattern with * and ?
// matches. Regular files only, sorted by path, so that every machine sees one order. Never empty.
std::vector<std::filesystem::path> list_files(const std::filesystem::path& what);

bool is_readable(const std::filesystem::path& path);
std::string read_text(const std::filesystem::path& path);
inline bool looks_binary(std::string_view content) { return content.find('\0') != content.npos; }

}  // namespace lockstep
