#include "common/launch_flags.h"

#include <CLI/CLI.hpp>
#include <iostream>

namespace lockstep {

void add_launch_flags(CLI::App& app, Launch& launch) {
  auto number = [&](const char* name, auto& value, const char* what) {
    return app.add_option(name, value, what)->capture_default_str();
  };
  whole(number("--ranks", launch.ranks, "ranks as threads of this process"), 1, 256);
  real(number("--time-limit", launch.options.time_limit, "seconds that a rank waits for others"), 0,
       1e6, true);
  whole(number("--copy-from", launch.options.copy_from,
               "bytes from which GPUs move buffers by copy engines; below, by NCCL's kernels"),
        0, int64_t(1) << 60);
  app.add_flag("--check-calls", launch.options.check_calls,
               "ranks agree on operation and sizes before each call");
  app.add_flag("--check-buffers", launch.options.check_buffers,
               "find buffers that change while an operation is under way");
}

std::optional<Launch> parse_launch(int argc, char** argv, const std::string& what_it_does,
                                   const std::function<void(CLI::App&)>& more) {
  Launch launch;
  std::string device = "cpu";
  bool dry_run = false;
  CLI::App app(what_it_does);
  add_launch_flags(app, launch);
  word(app.add_option("--device", device,
                      "cpu, or cuda: one GPU per process, or one for all threads")
           ->capture_default_str(),
       {"cpu", "cuda"});
  app.add_flag("--dry-run", dry_run, "check the flags and stop");
  if (more) more(app);
  if (!parse_flags(app, argc, argv)) return std::nullopt;
  launch.device = choose_device(device);
  if (!dry_run) return launch;
  std::cout << launch.ranks << (launch.ranks == 1 ? " rank on " : " ranks on ") << device << "\n";
  return std::nullopt;
}

std::optional<Options> parse_training(int argc, char** argv, const std::string& what_it_does,
                                      Launch& launch, const std::function<void(CLI::App&)>& more) {
  auto options = parse_options_of_ranks(argc, argv, what_it_does, [&](CLI::App& app) {
    add_launch_flags(app, launch);
    if (more) more(app);
  });
  if (options) launch.device = options->device;
  return options;
}

void check_divides(const char* flag, int ranks, const Communicator& world) {
  require(world.size() % ranks == 0, flag, " ", ranks, " does not divide ", world.size(),
          world.size() == 1 ? " rank" : " ranks", ": start ", ranks, " or a multiple (--ranks ",
          ranks, ", or mpirun -n ", ranks, ")");
}

}  // namespace lockstep
