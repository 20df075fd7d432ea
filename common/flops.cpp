#include "common/flops.h"

#include <cstdio>
#include <regex>

namespace lockstep {

double model_flops_per_token(const ModelConfig& c, int64_t length) {
  double attention = double(c.layers) * double(c.q_size()) * double(length);  // L h s
  return 6 * double(c.parameters()) + 12 * attention;
}

double hardware_flops_per_token(const ModelConfig& c, int64_t length, Recompute recompute) {
  double model = model_flops_per_token(c, length);
  double attention = double(c.layers) * double(c.q_size()) * double(length);
  int64_t outside = (c.tied ? 1 : 2) * c.vocab * c.hidden + c.hidden;  // tables and the last norm
  switch (recompute) {
    case Recompute::None: return model;
    case Recompute::Selective: return model + 4 * attention;
    case Recompute::Full: return model + 2 * double(c.parameters() - outside) + 4 * attention;
  }
  fail("unknown kind of recomputation");
}

namespace {

struct Row {
  const char* name;         // as the CUDA runtime gives it, a regular expression
  double bf16, fp16, fp32;  // 10^12 per second; 0: the device has none, or we do not know
};

// Dense: the datasheets' larger numbers with sparsity are twice as much. GeForce numbers are for
// sums in fp32, which are half as fast as in fp16. A name must match in full: a laptop's chip, a
// slice of a GPU (MIG) or a card for another market shares words with its big sister, not the peak.
const Row kPeaks[] = {
    // NVIDIA Blackwell datasheet (2024). NVIDIA's papers disagree on fp32.
    {"GB200", 2500, 2500, 0},
    {"B200", 2250, 2250, 0},
    // NVIDIA RTX Blackwell architecture paper (2025), appendix A.
    {"GeForce RTX 5090", 209.5, 209.5, 104.8},
    // NVIDIA H200 and H100 datasheets (2024).
    {"H200|GH200 [0-9]+GB?( HBM3e?)?", 989.5, 989.5, 67},
    {"H200 NVL", 835.5, 835.5, 60},
    {"H100 80GB HBM3", 989.5, 989.5, 67},
    {"H100 PCIe", 756.5, 756.5, 51},
    {"H100 NVL", 835.5, 835.5, 60},
    // NVIDIA L40S (2023), L40 and L4 datasheets; Ada architecture paper, appendix A.
    {"L40S", 362.05, 362.05, 91.6},
    {"L40", 181.05, 181.05, 90.5},
    {"L4", 121, 121, 30.3},
    {"GeForce RTX 4090", 165.2, 165.2, 82.6},
    // NVIDIA A100 (2021), A30, A40 and A10 datasheets; GA102 architecture paper, appendix A.
    {"A100(-(SXM4?|PCIE)-(40|80)GB| 80GB PCIe)?", 312, 312, 19.5},
    {"A30", 165, 165, 10.3},
    {"A40", 149.7, 149.7, 37.4},
    {"A10", 125, 125, 31.2},
    {"RTX A6000", 154.8, 154.8, 38.7},
    {"GeForce RTX 3090", 71, 71, 35.6},
    // NVIDIA T4 (2018) and V100 (2020) datasheets: before bf16.
    {"T4", 0, 65, 8.1},
    {"V100-SXM2-(16|32)GB", 0, 125, 15.7},
    {"V100-PCIE-(16|32)GB", 0, 112, 14},
};

}  // namespace

Peaks peaks_of(const std::string& device_name) {
  auto known = [](double x) { return x > 0 ? std::optional(x * 1e12) : std::nullopt; };
  for (const Row& row : kPeaks) {
    std::regex whole("(NVIDIA |Tesla )*(" + std::string(row.name) + ")");
    if (std::regex_match(device_name, whole))
      return {known(row.bf16), known(row.fp16), known(row.fp32)};
  }
  return {};
}

std::optional<double> peak_flops(const std::string& device_name, DType type) {
  Peaks peaks = peaks_of(device_name);
  return type == DType::BF16 ? peaks.bf16 : type == DType::F32 ? peaks.fp32 : std::nullopt;
}

Efficiency::Efficiency(const ModelConfig& config, int64_t length, Recompute recompute, DType type,
                       std::string device_name, int devices)
    : model_(model_flops_per_token(config, length) / devices),
      hardware_(hardware_flops_per_token(config, length, recompute) / devices),
      peak_(peak_flops(device_name, type)),
      type_(type),
      device_name_(std::move(device_name)) {}

Utilisation Efficiency::at(double tokens_per_second) const {
  if (!peak_ || !(tokens_per_second > 0)) return {};
  return {tokens_per_second * model_ / *peak_, tokens_per_second * hardware_ / *peak_};
}

std::string Efficiency::line(double tokens_per_second) const {
  auto percent = [](std::optional<double> x) {
    char out[32] = "n/a";
    if (x) std::snprintf(out, sizeof out, "%.1f %%", 100 * *x);
    return std::string(out);
  };
  char speed[32] = "n/a";
  if (tokens_per_second > 0) std::snprintf(speed, sizeof speed, "%.0f", tokens_per_second);
  Utilisation u = at(tokens_per_second);
  return text("speed   ", speed, " tokens/s, MFU ", percent(u.mfu), ", HFU ", percent(u.hfu));
}

std::string Efficiency::warning() const {
  if (peak_) return "";
  return text("warning: the peak of ", device_name_, " for ", name_of(type_),
              " is not known, so MFU and HFU are n/a");
}

}  // namespace lockstep
