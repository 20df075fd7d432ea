// What of chapter 08 needs no GPU: its arithmetic and its tables.

#include <gtest/gtest.h>

#include "08_kernels/device_facts.h"
#include "common/diagnose.h"

namespace lockstep {
namespace {

TEST(KernelsChapter, K10_KernelTableIsSortedByTimeOnTheGpu) {
  std::vector<TraceEvent> events;
  auto kernel = [&](const char* name, int64_t begin, int64_t end) {
    events.push_back(
        {name, TraceEvent::Kind::Kernel, {TraceEvent::Lane::Stream, 0}, begin, end, 1});
  };
  kernel("rope", 0, 10);
  kernel("matmul", 10, 60);
  kernel("rmsnorm", 60, 85);
  kernel("rope", 85, 100);
  kernel("rope", 100, 115);
  Diagnosis d = diagnose(events);
  ASSERT_EQ(d.table.size(), 3u);
  EXPECT_EQ(d.table[0].name, "matmul");
  EXPECT_EQ(d.table[1].name, "rope");  // three short ones together are longer than one rmsnorm
  EXPECT_EQ(d.table[1].calls, 3);
  EXPECT_EQ(d.table[1].total, 40);
  EXPECT_EQ(d.table[2].name, "rmsnorm");
  std::string text = to_text(d);
  EXPECT_LT(text.find("matmul"), text.find("rope"));
  EXPECT_LT(text.find("rope"), text.find("rmsnorm"));
}

TEST(KernelsChapter, K11_H100Has16896Fp32Units) {
  EXPECT_EQ(fp32_units(9, 0), 128);
  EXPECT_EQ(fp32_units(8, 0), 64);   // A100
  EXPECT_EQ(fp32_units(8, 6), 128);  // RTX 3090
  EXPECT_EQ(fp32_units(7, 5), 64);
  EXPECT_EQ(fp32_units(6, 0), 0);  // not known here
  DeviceFacts h100{"H100",           9, 0, 132, 32, 1024, 2048, 65536, 228 << 10, 50 << 20,
                   int64_t(80) << 30};
  std::string text = to_text(h100);
  for (const char* fact :
       {"H100, compute capability 9.0", "132 multiprocessors x 128 fp32 units = 16,896",
        "a warp is 32 threads, a block has at most 1,024, a multiprocessor 2,048",
        "65,536 registers and 228 KiB of shared memory", "50 MiB of L2 cache, 80 GiB of memory"})
    EXPECT_NE(text.find(fact), std::string::npos) << fact << "\n" << text;
  h100.major = 6;
  EXPECT_NE(to_text(h100).find("  132 multiprocessors\n"), std::string::npos);
}

TEST(KernelsChapter, CommasEveryThreeDigits) {
  EXPECT_EQ(with_commas(0), "0");
  EXPECT_EQ(with_commas(999), "999");
  EXPECT_EQ(with_commas(1000), "1,000");
  EXPECT_EQ(with_commas(16896), "16,896");
  EXPECT_EQ(with_commas(1234567), "1,234,567");
}

}  // namespace
}  // namespace lockstep
