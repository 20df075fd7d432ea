#pragma once
// How well is the hardware used? Operations that a model needs, over those that the device could
// have done in the time.
//
//   MFU = tokens/s x model operations per token    / peak   what training needs at least
//   HFU = tokens/s x hardware operations per token / peak   what was really computed
//
// They differ by what recomputation does twice: at equal speed it raises HFU and not MFU (Chowdhery
// et al., "PaLM", 2022, section 4.1 and appendix B). A peak that is not known is no number: both
// are then n/a.

#include <cstdint>
#include <optional>
#include <string>

#include "common/dtype.h"
#include "common/model_config.h"

namespace lockstep {

enum class Recompute : uint8_t { None, Selective, Full };

// Forward and backward: 6N + 12 L h s, with N all weights and s the length of a sequence. Causal
// attention needs half of the second term; by convention it is counted in full. The Ultra-Scale
// Playbook, appendix A3.
double model_flops_per_token(const ModelConfig& c, int64_t length);
// And what recomputation adds: selective another forward of attention's two products, 4 h s in each
// block; full another forward of the blocks, 2 operations for each of their weights and the same
// 4 h s.
double hardware_flops_per_token(const ModelConfig& c, int64_t length, Recompute recompute);

// Operations per second of dense matrix products by the type of their inputs, sums in fp32, from
// NVIDIA's datasheets (flops.cpp). Nothing where the device, or the type on it, is not known.
struct Peaks {
  std::optional<double> bf16, fp16, fp32;
};
Peaks peaks_of(const std::string& device_name);
std::optional<double> peak_flops(const std::string& device_name, DType type);

// Of one device. Nothing where there is no peak or no speed.
struct Utilisation {
  std::optional<double> mfu, hfu;  // 1: all of the peak
};

class Efficiency {
 public:
  Efficiency(const ModelConfig& config, int64_t length, Recompute recompute, DType type,
             std::string device_name, int devices = 1);
  Utilisation at(double tokens_per_second) const;
  // "speed   1234 tokens/s, MFU 41.2 %, HFU 54.0 %", or n/a.
  std::string line(double tokens_per_second) const;
  std::string warning() const;  // one sentence if the peak is unknown, else empty

 private:
  double model_, hardware_;  // operations per token, of each device
  std::optional<double> peak_;
  DType type_;
  std::string device_name_;
};

}  // namespace lockstep
