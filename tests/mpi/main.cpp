// GoogleTest on every rank. Verdicts are gathered at the end of each test, so that one that fails
// on rank 1 only fails the run; a rank that left a test early makes the others wait no longer than
// their time limit.

#include "tests/mpi/main.h"

#include <gtest/gtest.h>

#include <cstdio>

namespace lockstep {

static MpiJob* job = nullptr;

MpiJob& this_job() { return *job; }

std::unique_ptr<Communicator> fresh_world(Communicator::Options options, int64_t piece) {
  return job->world(options, piece);
}

namespace {

class Verdicts : public ::testing::EmptyTestEventListener {
 public:
  explicit Verdicts(std::unique_ptr<Communicator> ranks) : ranks_(std::move(ranks)) {}

  // Rank 0's own failures are printed by GoogleTest.
  void OnTestPartResult(const ::testing::TestPartResult& result) override {
    if (!result.failed() || ranks_->rank() == 0) return;
    std::fprintf(stderr, "rank %d: %s:%d: %s\n", ranks_->rank(),
                 result.file_name() ? result.file_name() : "?", result.line_number(),
                 result.summary());
  }

  void OnTestEnd(const ::testing::TestInfo& test) override {
    try {
      std::string failed = ranks_that_failed(test.result()->Failed());
      if (failed.empty()) return;
      all_passed_ = false;
      if (ranks_->rank() == 0)
        std::fprintf(stderr, "%s.%s failed on rank(s)%s of %d\n", test.test_suite_name(),
                     test.name(), failed.c_str(), ranks_->size());
    } catch (const std::exception& e) {
      std::fprintf(stderr, "%s.%s: no verdict: %s\n", test.test_suite_name(), test.name(),
                   e.what());
      job->end_all();
    }
  }

  bool all_passed() const { return all_passed_; }

 private:
  std::string ranks_that_failed(bool mine) {
    Tensor flags = Tensor::empty({ranks_->size()}, DType::I32, Device::CPU, Category::Buffers);
    ranks_->all_gather(Tensor::from(std::vector<int32_t>{mine}, {1}), flags).wait();
    std::string list;
    for (int r = 0; r < ranks_->size(); ++r)
      if (flags.data<int32_t>()[r]) list += text(" ", r);
    return list;
  }

  std::unique_ptr<Communicator> ranks_;
  bool all_passed_ = true;
};

}  // namespace
}  // namespace lockstep

int main(int argc, char** argv) {
  using namespace lockstep;
  ::testing::InitGoogleTest(&argc, argv);
  std::unique_ptr<MpiJob> joined = join_mpi_job();
  job = joined.get();
  auto& listeners = ::testing::UnitTest::GetInstance()->listeners();
  if (job->rank() != 0) delete listeners.Release(listeners.default_result_printer());
  auto* verdicts = new Verdicts(fresh_world({.time_limit = 60}));  // GoogleTest owns it
  listeners.Append(verdicts);
  int status = RUN_ALL_TESTS();
  bool passed = verdicts->all_passed() && status == 0;
  delete listeners.Release(verdicts);  // its communicator goes before MPI does
  return passed ? 0 : 1;
}
