#pragma once
// Programs as their users meet them: a command line, what it prints, its exit status; and a run
// that a test has time for.

#include <sys/wait.h>

#include <cstdio>
#include <nlohmann/json.hpp>
#include <sstream>

#include "tests/temporary.h"

namespace lockstep {

struct Output {
  int status = 0;   // -1: a signal ended it
  std::string out;  // stdout and stderr
  bool says(const std::string& part) const { return out.find(part) != std::string::npos; }
  // What follows `word` in the last line that has it.
  std::string after(const std::string& word) const {
    size_t at = out.rfind(word);
    if (at == std::string::npos) return "";
    at += word.size();
    return out.substr(at, out.find('\n', at) - at);
  }
  std::vector<std::string> lines() const {
    std::vector<std::string> all;
    std::istringstream stream(out);
    for (std::string line; std::getline(stream, line);) all.push_back(line);
    return all;
  }
};

inline Output shell(const std::string& command) {
  Output run;
  FILE* pipe = popen(("exec 2>&1; " + command).c_str(), "r");
  char buffer[4096];
  while (size_t n = fread(buffer, 1, sizeof buffer, pipe)) run.out.append(buffer, n);
  int status = pclose(pipe);
  run.status = WIFEXITED(status) ? WEXITSTATUS(status) : -1;
  return run;
}
// Ranks share the cores: a thread each.
inline Output shell_of_ranks(const std::string& command) {
  return shell("export OMP_NUM_THREADS=1; " + command);
}

// A folder with a text and a run.json that asks for a small model; flags win over what stands
// there.
class SmallRun {
 public:
  explicit SmallRun(const nlohmann::json& more) {
    std::string content;
    for (int i = 0; i < 101 * 16 + 1; ++i) content += char('a' + i * i % 23);
    nlohmann::json settings = {{"device", "cpu"},
                               {"ffn", 31},
                               {"sequence", 16},
                               {"micro-batch", 2},
                               {"warmup", 2},
                               {"sample", 4},
                               {"evaluation-batches", 2},
                               {"data", folder.write("text.txt", content)}};
    settings.update(more);
    folder.write("run.json", settings.dump());
  }
  std::string flags(const std::string& more) const {
    return text(" --config ", at("run.json"), " ", more);
  }
  std::string at(const std::string& name) const { return folder / name; }
  TemporaryFolder folder;
};

}  // namespace lockstep
