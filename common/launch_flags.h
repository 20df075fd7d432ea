#pragma once
// The flags of programs that show communication: --ranks, --device, --time-limit and the checks.
// Programs that train have them among their own (options.h).

#include <functional>
#include <optional>
#include <string>

#include "common/command_line.h"
#include "common/ranks.h"

namespace lockstep {

void add_launch_flags(CLI::App& app, Launch& launch, std::string& device);

// Reads argv; `more` adds a program's own flags. Prints --help itself, and returns nothing then, or
// with --dry-run.
std::optional<Launch> parse_launch(int argc, char** argv, const std::string& what_it_does,
                                   const std::function<void(CLI::App&)>& more = {});

}  // namespace lockstep
