// The rules that keep the sources readable, checked on the sources themselves: at most 300 lines of
// code in a file of common/ or of a chapter, and 100 columns everywhere. Comments and blank lines
// are free, so the lesson at the head of a file costs nothing. A file with a good reason states it:
//   // long file: <reason>
//   // long line: <reason>
// And the table in tests/README.md names exactly the tests that there are for checklist and
// pitfalls.

#include <gtest/gtest.h>

#include <algorithm>
#include <filesystem>
#include <fstream>
#include <regex>
#include <set>
#include <sstream>
#include <string>
#include <vector>

namespace {

namespace fs = std::filesystem;

constexpr int kMaxLines = 300, kMaxColumns = 100;

// The place behind the string or character literal that starts at `i`.
size_t skip_literal(const std::string& source, size_t i) {
  const char quote = source[i++];
  while (i < source.size() && source[i] != quote && source[i] != '\n') {
    i += source[i] == '\\' ? 2 : 1;
  }
  return std::min(i + 1, source.size());
}

// The place behind the raw string R"mark(...)mark" that starts at `i`.
size_t skip_raw_string(const std::string& source, size_t i) {
  const size_t open = source.find('(', i);
  if (open == std::string::npos) return source.size();
  const std::string close = ")" + source.substr(i + 2, open - i - 2) + "\"";
  const size_t end = source.find(close, open);
  return end == std::string::npos ? source.size() : end + close.size();
}

bool is_word(char c) { return std::isalnum(static_cast<unsigned char>(c)) || c == '_'; }

std::string without_comments(std::string source) {
  size_t i = 0;
  while (i < source.size()) {
    const bool in_word = i > 0 && is_word(source[i - 1]);  // 1'000 holds no character literal
    size_t end = std::string::npos;
    if (source.compare(i, 2, "//") == 0) {
      end = source.find('\n', i);
    } else if (source.compare(i, 2, "/*") == 0) {
      end = source.find("*/", i + 2);
      if (end != std::string::npos) end += 2;
    } else {
      if (source.compare(i, 2, "R\"") == 0 && !in_word) {
        i = skip_raw_string(source, i);
      } else if (source[i] == '"' || (source[i] == '\'' && !in_word)) {
        i = skip_literal(source, i);
      } else {
        ++i;
      }
      continue;
    }
    for (end = std::min(end, source.size()); i < end; ++i) {
      if (source[i] != '\n') source[i] = ' ';
    }
  }
  return source;
}

std::vector<std::string> lines_of(const std::string& source) {
  std::vector<std::string> lines;
  std::istringstream in(source);
  for (std::string line; std::getline(in, line);) lines.push_back(line);
  return lines;
}

int code_lines(const std::string& source) {
  const auto lines = lines_of(without_comments(source));
  return int(std::count_if(lines.begin(), lines.end(), [](const std::string& line) {
    return line.find_first_not_of(" \t\r") != std::string::npos;
  }));
}

// Characters, not bytes: in UTF-8 all bytes of a character but the first are 10xxxxxx.
int columns(const std::string& line) {
  return int(std::count_if(line.begin(), line.end(), [](char c) { return (c & 0xc0) != 0x80; }));
}

// A reason stands on a line of its own.
bool states(const std::string& source, const std::string& rule) {
  const std::string form = "// " + rule + ": ";
  for (const std::string& line : lines_of(source)) {
    const size_t start = std::min(line.find_first_not_of(' '), line.size());
    if (line.compare(start, form.size(), form) == 0 && line.size() > start + form.size()) {
      return true;
    }
  }
  return false;
}

std::string too_long(const std::string& name, const std::string& source) {
  const int count = code_lines(source);
  if (count <= kMaxLines || states(source, "long file")) return "";
  return name + " has " + std::to_string(count) + " lines of code (at most " +
         std::to_string(kMaxLines) + "): make two files of it, or state // long file: <reason>\n";
}

std::string too_wide(const std::string& name, const std::string& source) {
  std::string complaints;
  int number = 0;
  const bool stated = states(source, "long line");
  for (const std::string& line : lines_of(source)) {
    const std::string place = name + ":" + std::to_string(++number);
    if (columns(line) > kMaxColumns && !stated) {
      complaints += place + " has " + std::to_string(columns(line)) + " columns (at most " +
                    std::to_string(kMaxColumns) + "), and no // long line: <reason> is stated\n";
    }
    if (line.find('\t') != std::string::npos) complaints += place + " has a tab\n";
  }
  return complaints;
}

std::string read(const fs::path& path) {
  std::ifstream in(path, std::ios::binary);
  return {std::istreambuf_iterator<char>(in), {}};
}

std::vector<fs::path> sources_in(const fs::path& folder) {
  std::vector<fs::path> found;
  for (const auto& entry : fs::recursive_directory_iterator(folder)) {
    const std::string type = entry.path().extension().string();
    if (type == ".h" || type == ".cpp" || type == ".cu" || type == ".cuh") {
      found.push_back(entry.path());
    }
  }
  std::sort(found.begin(), found.end());
  return found;
}

const fs::path root = LOCKSTEP_SOURCE_DIR;

std::vector<fs::path> chapters_and_common() {
  std::vector<fs::path> found = sources_in(root / "common");
  for (const auto& entry : fs::directory_iterator(root)) {
    const std::string name = entry.path().filename().string();
    if (!std::regex_match(name, std::regex("[0-9][0-9]_\\w+"))) continue;
    for (const fs::path& path : sources_in(entry.path())) found.push_back(path);
  }
  return found;
}

std::set<std::string> matches(const std::string& source, const std::string& pattern) {
  const std::regex regex(pattern);
  std::set<std::string> found;
  for (std::sregex_iterator match(source.begin(), source.end(), regex), end; match != end; ++match)
    found.insert((*match)[1]);
  return found;
}

// C1_..., S12_..., Pitfall115_...
const std::string kName = "((?:[A-Z]|Pitfall)[0-9]+_\\w+)";

std::set<std::string> names_in_code(const std::string& source) {
  return matches(without_comments(source), "(?:^|\\n)TEST(?:_[FP])?\\(\\s*\\w+,\\s*" + kName);
}
std::set<std::string> names_in_table(const std::string& readme) {
  return matches(readme, "\\b" + kName);
}

std::string only_in(const std::set<std::string>& here, const std::set<std::string>& there) {
  std::string missing;
  for (const std::string& name : here) {
    if (!there.count(name)) missing += "  " + name + "\n";
  }
  return missing;
}

std::string repeat(int n, const std::string& line) {
  std::string all;
  while (n-- > 0) all += line;
  return all;
}

TEST(SourceRules, ChaptersAndCommonStayWithin300LinesOfCode) {
  const auto files = chapters_and_common();
  ASSERT_GT(files.size(), 10u);
  std::string complaints;
  for (const fs::path& path : files) {
    complaints += too_long(fs::relative(path, root).string(), read(path));
  }
  EXPECT_TRUE(complaints.empty()) << complaints;
}

TEST(SourceRules, AllSourcesStayWithin100Columns) {
  std::string complaints;
  auto files = chapters_and_common();
  for (const fs::path& path : sources_in(root / "tests")) files.push_back(path);
  for (const fs::path& path : files) {
    complaints += too_wide(fs::relative(path, root).string(), read(path));
  }
  EXPECT_TRUE(complaints.empty()) << complaints;
}

TEST(SourceRules, TestsReadmeNamesExactlyTheTestsThatThereAre) {
  std::set<std::string> code;
  for (const fs::path& path : sources_in(root / "tests")) code.merge(names_in_code(read(path)));
  // Scripts get their name where they are registered.
  code.merge(matches(read(root / "tests/CMakeLists.txt"), "lockstep_script\\(" + kName));
  const std::set<std::string> table = names_in_table(read(root / "tests/README.md"));
  ASSERT_FALSE(code.empty());
  EXPECT_TRUE(only_in(code, table).empty()) << "tests without a line in tests/README.md:\n"
                                            << only_in(code, table);
  EXPECT_TRUE(only_in(table, code).empty()) << "lines in tests/README.md without a test:\n"
                                            << only_in(table, code);
}

TEST(SourceRules, Line301OfCodeIsOneTooMany) {
  EXPECT_EQ(too_long("a.cpp", repeat(300, "f();\n")), "");
  EXPECT_NE(too_long("a.cpp", repeat(301, "f();\n")).find("a.cpp has 301 lines"),
            std::string::npos);
  EXPECT_EQ(too_long("a.cpp", "// long file: a table\n" + repeat(301, "f();\n")), "");
  EXPECT_NE(too_long("a.cpp", "f(\"// long file: no comment\");\n" + repeat(301, "f();\n")), "");
  EXPECT_NE(too_long("a.cpp", "// long file: \n" + repeat(301, "f();\n")), "");
}

TEST(SourceRules, CommentsAndBlankLinesAreFree) {
  const std::string lesson = repeat(500, "// the lesson\n") + "\n/* more\n\n of it */\n";
  EXPECT_EQ(code_lines(lesson), 0);
  EXPECT_EQ(code_lines(lesson + "  // indented\nint a;  // behind code\n/* before */ int b;\n"), 2);
  EXPECT_EQ(too_long("a.cpp", lesson + repeat(300, "f();\n")), "");
  EXPECT_NE(too_long("a.cpp", lesson + repeat(301, "f();\n")), "");
}

TEST(SourceRules, LiteralsAreNoComments) {
  EXPECT_EQ(code_lines("f(\"/*\");\ng();\nh(\"*/\");\n"), 3);
  EXPECT_EQ(code_lines("f('\"');  // \"\ng('\\'');\nint n = 1'000;\n// x'y\nh();\n"), 4);
  EXPECT_EQ(code_lines("f(R\"(\n// text\n)\");\n"), 3);
  EXPECT_EQ(code_lines("f(\"\\\\\");  /*\nnot code */\n"), 1);
}

TEST(SourceRules, Column101IsOneTooMany) {
  EXPECT_EQ(too_wide("a.h", std::string(100, 'x')), "");
  EXPECT_NE(too_wide("a.h", "\n" + std::string(101, 'x')).find("a.h:2 has 101"), std::string::npos);
  EXPECT_EQ(too_wide("a.h", "// long line: a URL\n" + std::string(101, 'x')), "");
  EXPECT_EQ(too_wide("a.h", repeat(100, "→")), "");  // three bytes each
  EXPECT_NE(too_wide("a.h", repeat(101, "→")), "");
  EXPECT_NE(too_wide("a.h", "\tint a;"), "");
}

TEST(SourceRules, NamesAreFoundInCodeAndTable) {
  const std::set<std::string> two = {"Pitfall1_A", "S12_B"};
  EXPECT_EQ(names_in_code("TEST(X, S12_B) {}\nTEST_F(X,\n    Pitfall1_A) {}\n// TEST(X, C1_C)\n"
                          "TEST(X, Plain) {}\n"),
            two);
  EXPECT_EQ(names_in_table("| S12 | `S12_B` |\n| 1 | `X.Pitfall1_A` |\n"), two);
  EXPECT_EQ(only_in(two, {"S12_B"}), "  Pitfall1_A\n");
}

}  // namespace
