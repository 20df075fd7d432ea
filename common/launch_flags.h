#pragma once
// The flags of programs with several ranks: --ranks, --time-limit and the checks. Programs that
// show communication add --device to them; programs that train have it among their options.

#include <functional>
#include <optional>
#include <string>

#include "common/command_line.h"
#include "common/options.h"
#include "common/ranks.h"

namespace lockstep {

void add_launch_flags(CLI::App& app, Launch& launch);

// Of a program that shows communication. Reads argv; `more` adds a program's own flags. Prints
// --help itself, and returns nothing then, or with --dry-run.
std::optional<Launch> parse_launch(int argc, char** argv, const std::string& what_it_does,
                                   const std::function<void(CLI::App&)>& more = {});

// Of a program that trains on several ranks: all of Options' flags besides. Its batch is settled
// when the ranks are there (settle_ranks, plan.h).
std::optional<Options> parse_training(int argc, char** argv, const std::string& what_it_does,
                                      Launch& launch,
                                      const std::function<void(CLI::App&)>& more = {});

// Refuses a group of so many ranks that the job's cannot be shared out into. flag: "--tp".
void check_divides(const char* flag, int ranks, const Communicator& world);

}  // namespace lockstep
