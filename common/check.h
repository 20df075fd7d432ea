#pragma once
// One way to fail. A wrong input or a broken promise throws an Error that carries one sentence and
// the line that found it; run_main (command_line.h) prints it and ends the program with a non-zero
// exit.
//
//   require(heads % tp == 0, "heads ", heads, " cannot be cut into ", tp, " parts");
//   check(cudaMemcpyAsync(...));     // library calls: an overload stands beside each library's use

#include <cstdint>
#include <source_location>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

namespace lockstep {

struct Error : std::runtime_error {
  Error(const std::string& sentence, std::source_location where)
      : std::runtime_error(sentence), where(where) {}
  std::source_location where;
};

using Shape = std::vector<int64_t>;
inline std::string to_string(const Shape& shape) {  // "[2, 3]"
  std::string out = "[";
  for (size_t i = 0; i < shape.size(); ++i) out += (i ? ", " : "") + std::to_string(shape[i]);
  return out + "]";
}

// text(1, " of ", 2) == "1 of 2"; shapes are written as lists.
template <class... Parts>
std::string text(const Parts&... parts) {
  std::ostringstream out;
  auto write = [&](const auto& part) {
    if constexpr (std::is_same_v<std::decay_t<decltype(part)>, Shape>) {
      out << to_string(part);
    } else {
      out << part;
    }
  };
  (write(parts), ...);
  return out.str();
}

// A bool that remembers the line it was written on: default arguments are evaluated at the call.
struct Condition {
  Condition(bool holds, std::source_location where = std::source_location::current())
      : holds(holds), where(where) {}
  bool holds;
  std::source_location where;
};

template <class... Parts>
void require(Condition condition, const Parts&... sentence) {
  if (!condition.holds) throw Error(text(sentence...), condition.where);
}

// For the end of a switch or a search that found nothing.
struct Here {
  Here(std::source_location where = std::source_location::current()) : where(where) {}
  std::source_location where;
};
[[noreturn]] inline void fail(const std::string& sentence, Here here = {}) {
  throw Error(sentence, here.where);
}

}  // namespace lockstep
