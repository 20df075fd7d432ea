#include "common/device.h"

#include <sstream>

#include "common/check.h"

namespace lockstep::device {

// Machine code for capability X.y runs on X.z with z >= y; code for 90a only on 9.0 itself; PTX of
// the lowest architecture is compiled by the driver for anything newer.
std::string architecture_mismatch(const std::string& device_name, int major, int minor,
                                  const std::string& compiled) {
  int capability = 10 * major + minor;
  std::istringstream list(compiled);
  bool first = true;
  for (std::string arch; list >> arch; first = false) {
    int number = std::stoi(arch);
    bool specific = !std::isdigit(static_cast<unsigned char>(arch.back()));
    if (number == capability) return "";
    if (specific) continue;
    if (first && capability > number) return "";
    if (number / 10 == major && capability > number) return "";
  }
  return text(device_name, " has compute capability ", major, ".", minor,
              ", but this program was compiled for ", compiled,
              ": build it again with cmake -DLOCKSTEP_CUDA_ARCHITECTURES=", capability);
}

}  // namespace lockstep::device
