// The diagnosis of event lists made by hand, with answers worked out by hand, and of a real step.

#include "common/diagnose.h"

#include <gtest/gtest.h>

#include <thread>

#include "tests/rig.h"
#include "tests/temporary.h"

namespace lockstep {
namespace {

using Kind = TraceEvent::Kind;
using Lane = TraceEvent::Lane;

struct List {
  std::vector<TraceEvent> events;
  int64_t step = 1;
  // On CPU thread 0; times in nanoseconds.
  List& host(Kind kind, const char* name, int64_t begin, int64_t end) {
    events.push_back({name, kind, {Lane::Thread, 0}, begin, end, step});
    return *this;
  }
  List& kernel(const char* name, int64_t begin, int64_t end, int stream = 0) {
    events.push_back({name, Kind::Kernel, {Lane::Stream, stream}, begin, end, step});
    return *this;
  }
  Diagnosis diagnosis() const { return diagnose(events); }
};

bool says(const Diagnosis& d, const std::string& what) {
  return to_text(d).find(what) != std::string::npos;
}

TEST(Diagnose, S14_IdleShareAndLongestGaps) {
  List l;
  l.kernel("a", 100, 200).kernel("b", 260, 300).kernel("c", 290, 340).kernel("d", 350, 400);
  l.host(Kind::Host, "forward", 0, 255).host(Kind::Host, "backward", 255, 400);
  l.host(Kind::Host, "norm", 210, 250);  // inside forward, but it does not fill the gap
  Diagnosis d = l.diagnosis();
  EXPECT_EQ(d.span, 300);  // from the first kernel to the last: 100 to 400
  EXPECT_EQ(d.idle, 60 + 10);
  EXPECT_DOUBLE_EQ(d.idle_share(), 70.0 / 300);
  ASSERT_EQ(d.gaps.size(), 2u);
  EXPECT_EQ(d.gaps[0].begin, 200);
  EXPECT_EQ(d.gaps[0].length, 60);
  EXPECT_EQ(d.gaps[0].meanwhile, "forward");
  EXPECT_EQ(d.gaps[0].cause, Gap::Cause::Other);
  EXPECT_EQ(d.gaps[1].length, 10);
  EXPECT_EQ(d.gaps[1].meanwhile, "backward");
  EXPECT_TRUE(says(d, "23.3 % of 0.00 ms")) << to_text(d);
}

TEST(Diagnose, S14_InnermostOfThePartsThatFillAGap) {
  List l;
  l.kernel("a", 0, 100).kernel("b", 200, 300);
  l.host(Kind::Host, "step", 0, 300).host(Kind::Host, "optimizer", 90, 250);
  EXPECT_EQ(l.diagnosis().gaps.at(0).meanwhile, "optimizer");
}

// Three steps of 100, of which the device works for 60: whole steps are looked at, so that neither
// the start nor the end of the recording changes the share.
TEST(Diagnose, S14_WholeStepsAreLookedAt) {
  List l;
  for (l.step = 1; l.step <= 3; ++l.step) {
    int64_t at = 100 * l.step;
    l.host(Kind::Step, "step", at - 30, at + 70);
    l.kernel("a", at, at + 20).kernel("b", at + 20, at + 60);
  }
  Diagnosis d = l.diagnosis();
  EXPECT_EQ(d.steps, 3);
  EXPECT_EQ(d.span, 200);
  EXPECT_DOUBLE_EQ(d.idle_share(), 0.4);
  EXPECT_EQ(d.table.at(0).calls, 3);  // the table counts all
}

TEST(Diagnose, S14_DataLoading) {
  List l;
  l.kernel("a", 0, 100).kernel("b", 300, 400);
  l.host(Kind::Data, "data", 120, 280).host(Kind::Launch, "b", 285, 299);
  Diagnosis d = l.diagnosis();
  EXPECT_EQ(d.gaps.at(0).cause, Gap::Cause::Data);
  EXPECT_EQ(d.gaps.at(0).meanwhile, "data");
  EXPECT_EQ(d.lost.at(size_t(Gap::Cause::Data)), 200);
  EXPECT_TRUE(says(d, "data was being prepared (data)")) << to_text(d);
}

TEST(Diagnose, S14_HostSynchronisation) {
  List l;
  // The host waits for kernel a, and only then launches b.
  l.kernel("a", 0, 100).kernel("b", 150, 200).kernel("c", 200, 300);
  l.host(Kind::Wait, "synchronize", 10, 105).host(Kind::Host, "optimizer", 5, 180);
  l.host(Kind::Launch, "b", 130, 148).host(Kind::Launch, "c", 150, 160);
  // A wait for what is long done costs nothing and explains nothing.
  l.host(Kind::Wait, "wait for event", 120, 121);
  Diagnosis d = l.diagnosis();
  ASSERT_EQ(d.gaps.size(), 1u);
  EXPECT_EQ(d.gaps[0].cause, Gap::Cause::HostWait);
  EXPECT_EQ(d.gaps[0].meanwhile, "optimizer, synchronize");
  EXPECT_EQ(d.host_wait, 95 + 1);
  EXPECT_DOUBLE_EQ(d.host_wait_share(), 96.0 / 300);
  EXPECT_TRUE(says(d, "the host had waited for the device")) << to_text(d);
}

TEST(Diagnose, S14_AWaitThatIsOverIsNotToBlame) {
  List l;
  l.kernel("a", 0, 100).kernel("b", 150, 200);
  l.host(Kind::Wait, "wait for event", 110, 111).host(Kind::Launch, "b", 112, 149);
  EXPECT_EQ(l.diagnosis().gaps.at(0).cause, Gap::Cause::Launch);
}

TEST(Diagnose, S14_LaunchOverhead) {
  List slow, fast;
  for (int64_t i = 0; i < 10; ++i) {
    slow.host(Kind::Launch, "add", 100 * i, 100 * i + 70);
    slow.kernel("add", 100 * i + 70, 100 * i + 90);  // 20 of work behind 70 of launching
    fast.host(Kind::Launch, "matmul", 10 * i, 10 * i + 7);
    fast.kernel("matmul", 100 + 200 * i, 300 + 200 * i);  // queued: one runs into the next
  }
  Diagnosis d = slow.diagnosis();
  EXPECT_TRUE(d.launch_bound());
  EXPECT_EQ(d.launch_time / d.launches, 70);
  EXPECT_EQ(d.kernel_time / d.kernels, 20);
  EXPECT_EQ(d.span, 920);
  EXPECT_EQ(d.idle, 9 * 80);
  EXPECT_EQ(d.lost.at(size_t(Gap::Cause::Launch)), 9 * 80);
  EXPECT_TRUE(says(d, "launch-bound, the device waits")) << to_text(d);
  d = fast.diagnosis();
  EXPECT_FALSE(d.launch_bound());
  EXPECT_EQ(d.idle, 0);
  EXPECT_TRUE(says(d, "not launch-bound")) << to_text(d);
}

// A host far ahead waits in its launches for room in the queue: long launches, and no gap.
TEST(Diagnose, S14_AFullQueueIsNoLaunchOverhead) {
  List l;
  for (int64_t i = 0; i < 10; ++i) {
    l.host(Kind::Launch, "add", 100 * i, 100 * i + 99);
    l.kernel("add", 500 + 98 * i, 500 + 98 * (i + 1));
  }
  Diagnosis d = l.diagnosis();
  EXPECT_GT(d.launch_time / d.launches, d.kernel_time / d.kernels);
  EXPECT_FALSE(d.launch_bound());
}

TEST(Diagnose, S14_SerialAndOverlappedStreams) {
  List serial, half, full;
  serial.kernel("work", 0, 100).kernel("send", 100, 150, 1).kernel("work", 150, 250);
  half.kernel("work", 0, 100).kernel("send", 75, 125, 1).kernel("work", 125, 225);
  full.kernel("work", 0, 200).kernel("send", 100, 150, 1);
  EXPECT_EQ(serial.diagnosis().lanes, 2);
  EXPECT_DOUBLE_EQ(serial.diagnosis().overlap, 0);
  EXPECT_DOUBLE_EQ(half.diagnosis().overlap, 0.5);  // 25 of 50
  EXPECT_DOUBLE_EQ(full.diagnosis().overlap, 1);
  EXPECT_TRUE(says(serial.diagnosis(), "0 % of what could overlap did, they take turns"));
  EXPECT_TRUE(says(full.diagnosis(), "100 % of what could overlap did\n"));
  List one;
  one.kernel("work", 0, 100);
  EXPECT_FALSE(says(one.diagnosis(), "overlap"));
}

TEST(Diagnose, S14_KernelsByTime) {
  List l;
  l.kernel("add", 0, 10).kernel("matmul", 10, 60).kernel("add", 60, 70).kernel("matmul", 70, 100);
  Diagnosis d = l.diagnosis();
  ASSERT_EQ(d.table.size(), 2u);
  EXPECT_EQ(d.table[0].name, "matmul");
  EXPECT_EQ(d.table[0].calls, 2);
  EXPECT_EQ(d.table[0].total, 80);
  EXPECT_EQ(d.table[1].name, "add");
  EXPECT_EQ(d.table[1].total, 20);
  EXPECT_TRUE(says(d, "80.0 %")) << to_text(d);
}

// On the CPU the kernels run on the thread that calls them.
TEST(Diagnose, S14_CpuThreadsAreTheComputeLaneWhereThereIsNoStream) {
  List l;
  l.host(Kind::Kernel, "matmul", 0, 100).host(Kind::Data, "data", 100, 200);
  l.host(Kind::Kernel, "matmul", 200, 300);
  Diagnosis d = l.diagnosis();
  EXPECT_EQ(d.idle, 100);
  EXPECT_EQ(d.gaps.at(0).cause, Gap::Cause::Data);
  EXPECT_FALSE(d.launch_bound());
  EXPECT_FALSE(says(d, "launches")) << to_text(d);
  l.kernel("matmul", 0, 300);  // with a stream, the thread's kernels are not what counts
  EXPECT_EQ(l.diagnosis().idle, 0);
}

// A real step behind 20 ms of preparing data.
void diagnose_a_real_step(Device device) {
  SCOPED_TRACE(device == Device::CPU ? "CPU" : "CUDA");
  Rig::Settings settings;
  settings.device = device;
  Rig rig(settings);
  MicroBatch batch = random_batch(2, 8, 20, 1, 0, device);
  Trace trace(device);
  TraceScope scope(&trace);
  for (int i = 1; i <= 5; ++i) {
    {
      Span data(&trace, "data", Kind::Data);
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
    }
    rig.step({batch});
    lockstep::device::synchronize();
    trace.step();
  }
  Diagnosis d = diagnose(trace.recording().events);
  EXPECT_EQ(d.steps, 3);
  EXPECT_GT(d.span, 40'000'000);  // two steps, each with its 20 ms of data
  EXPECT_GE(d.lost[size_t(Gap::Cause::Data)], 39'000'000);
  EXPECT_EQ(d.gaps.at(0).cause, Gap::Cause::Data);
  EXPECT_EQ(d.gaps.at(1).cause, Gap::Cause::Data);
  EXPECT_GE(d.gaps.at(1).length, 19'900'000);  // sleeping takes at least as long as asked
  EXPECT_NE(to_text(d).find("data was being prepared"), std::string::npos) << to_text(d);
  if (device == Device::CUDA) {
    // Tiny kernels: each runs for less time than its launch takes.
    EXPECT_GT(d.launches, 100);
    EXPECT_TRUE(d.launch_bound()) << to_text(d);
  }
}

TEST(Diagnose, S14_DiagnosisOfARealStep) {
  diagnose_a_real_step(Device::CPU);
  if (device::available()) diagnose_a_real_step(Device::CUDA);
}

TEST(Diagnose, NothingRecorded) {
  EXPECT_EQ(diagnose({}).span, 0);
  EXPECT_TRUE(says(diagnose({}), "no kernel"));
}

TEST(Diagnose, RefusesARunTooShortAndAFileThatCannotBeWritten) {
  TemporaryFolder dir;
  EXPECT_EQ(start_trace("", false, Device::CPU, 1), nullptr);
  EXPECT_NE(start_trace("", true, Device::CPU, 5), nullptr);
  EXPECT_THROW(start_trace("", true, Device::CPU, 4), Error);
  EXPECT_NE(start_trace(dir / "t.json", false, Device::CPU, 5), nullptr);
  EXPECT_THROW(start_trace(dir / "absent/t.json", false, Device::CPU, 5), Error);
}

}  // namespace
}  // namespace lockstep
