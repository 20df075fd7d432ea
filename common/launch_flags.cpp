#include "common/launch_flags.h"

#include <CLI/CLI.hpp>
#include <iostream>

#include "common/device.h"

namespace lockstep {

void add_launch_flags(CLI::App& app, Launch& launch, std::string& device) {
  app.add_option("--ranks", launch.ranks, "ranks as threads of this process")
      ->capture_default_str()
      ->check(CLI::Range(1, 256));
  app.add_option("--device", device, "cpu, or cuda: one GPU per process, or one for all threads")
      ->capture_default_str()
      ->check(CLI::IsMember({"cpu", "cuda"}));
  app.add_option("--time-limit", launch.options.time_limit, "seconds that a rank waits for others")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_flag("--check-calls", launch.options.check_calls,
               "ranks agree on operation and sizes before each call");
  app.add_flag("--check-buffers", launch.options.check_buffers,
               "find buffers that change while an operation is under way");
}

void settle_launch(Launch& launch, const std::string& device) {
  bool gpu = device == "cuda";
  require(!gpu || device::available(), "--device cuda: ",
          device::why_not().empty() ? "this program was built without CUDA" : device::why_not());
  launch.device = gpu ? Device::CUDA : Device::CPU;
}

std::optional<Launch> parse_launch(int argc, char** argv, const std::string& what_it_does,
                                   const std::function<void(CLI::App&)>& more) {
  Launch launch;
  std::string device = "cpu";
  bool dry_run = false;
  CLI::App app(what_it_does);
  add_launch_flags(app, launch, device);
  app.add_flag("--dry-run", dry_run, "check the flags and stop");
  if (more) more(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help();
    return std::nullopt;
  } catch (const CLI::ParseError& e) {
    fail(one_line(e.what()) + " (--help lists all flags)");
  }
  settle_launch(launch, device);
  if (!dry_run) return launch;
  std::cout << launch.ranks << " ranks on " << device << "\n";
  return std::nullopt;
}

}  // namespace lockstep
