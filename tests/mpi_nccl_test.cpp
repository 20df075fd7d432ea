// Ranks as GPUs over NCCL and copy engines. What all backends promise is in comm_contract.h; here
// is what these add: a host that never waits, buffers that outlive their owners, groups, types.
// Runs under mpirun with 2, 4 and 8 ranks, through nccl_hostid.sh where these are more than GPUs:
//
//   mpirun -n 4 tests/nccl_hostid.sh build/tests/mpi_nccl_test

#include <gtest/gtest.h>

#include <chrono>
#include <cstdlib>
#include <thread>

#include "common/device.h"
#include "common/device_cuda.h"
#include "common/gpu_ranks.h"
#include "common/kernels.h"
#include "tests/comm_contract.h"
#include "tests/mpi/main.h"

namespace lockstep {
namespace {

using Clock = std::chrono::steady_clock;

double seconds_since(Clock::time_point start) {
  return std::chrono::duration<double>(Clock::now() - start).count();
}

void expect_none(const Complaints& complaints) {
  for (const std::string& sentence : complaints) ADD_FAILURE() << sentence;
}

std::unique_ptr<Communicator> gpu_world(Communicator::Options options) {
  auto processes = fresh_world();
  return start_gpu_ranks(*processes, this_job().host().first, std::getenv("NCCL_HOSTID"),
                         std::make_shared<Ledger>(), options);
}

// One world for all tests: making one takes NCCL seconds.
class Nccl : public ::testing::Test {
 protected:
  static void SetUpTestSuite() {
    if (device::available() && this_job().size() > 1) world_ = gpu_world({.time_limit = 60});
  }
  static void TearDownTestSuite() { world_.reset(); }
  void SetUp() override {
    if (!world_) GTEST_SKIP() << "this needs GPUs and at least two ranks";
    world_->barrier();
  }

  static Communicator& world() { return *world_; }
  static int rank() { return world_->rank(); }
  static int size() { return world_->size(); }
  static const Kernels& k() { return kernels(Device::CUDA); }
  static Tensor gpu(int64_t n, double value) {
    Tensor t = Tensor::empty({n}, DType::F32, Device::CUDA);
    k().fill(t, value);
    return t;
  }
  // Work for the rank's stream: 256 MiB written `times` times.
  static void keep_busy(int times) {
    static constexpr int64_t kMany = 1 << 26;
    Tensor ballast = Tensor::empty({kMany}, DType::F32, Device::CUDA);
    for (int i = 0; i < times; ++i) k().fill(ballast, i);
  }
  static void expect_all(const Tensor& t, double value) {
    for (float got : t.values<float>()) ASSERT_EQ(got, value);
  }

 private:
  static inline std::unique_ptr<Communicator> world_;
};

TEST_F(Nccl, C12_KeepsTheContractOfAllBackends) {
  auto kernels_only = gpu_world({.time_limit = 60, .copy_from = INT64_MAX});
  expect_none(check_contract(*kernels_only, {.device = Device::CUDA, .rank_order = false}));
}

// What goes to or comes from one rank alone is left to NCCL's kernels.
TEST_F(Nccl, CopyEnginesKeepItAndAddInRankOrder) {
  auto copies = gpu_world({.time_limit = 60, .copy_from = 1});
  expect_none(check_contract(*copies, {.device = Device::CUDA, .reduce_too = false}));
}

// Of a size that no number of pieces, ranks or elements in 16 bytes divides, and more than an inbox
// has slots for.
TEST_F(Nccl, CopyEnginesMoveManyPieces) {
  int n = size(), next = (rank() + 1) % n, previous = (rank() + n - 1) % n;
  for (DType t : {DType::F32, DType::BF16}) {
    int64_t each = (int64_t(42) << 20) / int64_t(size_of(t)) + 13;
    auto of_rank = [](int r) { return [r](int64_t i) { return double((i + 31 * r) % 97); }; };
    auto sum = [&](int64_t i) {
      double all = 0;
      for (int r = 0; r < n; ++r) all += of_rank(r)(i);
      return t == DType::BF16 ? double(float(bf16(float(all)))) : all;
    };
    Checker check(world());
    Tensor whole = filled(t, {n * each}, Device::CUDA, of_rank(rank()));
    Tensor part = filled(t, {each}, Device::CUDA, of_rank(rank()));
    Tensor came = whole.like({each});
    world().reduce_scatter(whole, came).wait();
    check.expect_values("reduce_scatter", came, [&](int64_t i) { return sum(rank() * each + i); });
    world().all_reduce(whole).wait();
    check.expect_values("all_reduce", whole, sum);
    world().all_gather(part, whole).wait();
    check.expect_values("all_gather", whole,
                        [&](int64_t i) { return of_rank(int(i / each))(i % each); });
    world().exchange({{P2P::Send, next, part}, {P2P::Receive, previous, came}}).wait();
    check.expect_values("exchange", came, of_rank(previous));
    expect_none(check.take());
  }
}

TEST_F(Nccl, RanksAgreeBeforeEachCall) {
  auto checked = gpu_world({.time_limit = 60, .check_calls = true});
  expect_none(check_agreement(*checked, Device::CUDA));
}

TEST_F(Nccl, ChangedBuffersAreFound) {
  auto checked = gpu_world({.time_limit = 60, .check_buffers = true});
  expect_none(check_unchanged_buffers(*checked, Device::CUDA));
}

template <class T>
void expect_sum(Communicator& world, T base) {
  Tensor t = Tensor::from<T>({T(base + T(world.rank())), T(world.rank())}, {2}, Device::CUDA);
  world.all_reduce(t).wait();
  int n = world.size(), ranks = n * (n - 1) / 2;
  EXPECT_EQ(t.values<T>(), (std::vector<T>{T(T(n) * base + T(ranks)), T(ranks)}))
      << name_of(t.dtype());
}

TEST_F(Nccl, SumsOfWideAndNarrowTypes) {
  expect_sum<double>(world(), 1e15);
  expect_sum<int64_t>(world(), int64_t(1) << 40);
  expect_sum<int32_t>(world(), 1 << 20);
  expect_sum<uint8_t>(world(), 3);
}

// bf16 cannot count beyond 256 in steps of one; NCCL's own sum must at least be bf16's and never an
// integer's.
TEST_F(Nccl, BfloatSumsAreFloats) {
  for (DType t : {DType::BF16, DType::F16}) {
    Tensor x = filled(t, {1000}, Device::CUDA, [&](int64_t i) { return i % 2 ? 0.5 : -1.5; });
    world().all_reduce(x).wait();
    Checker check(world());
    check.expect_values("a sum of halves", x,
                        [&](int64_t i) { return (i % 2 ? 0.5 : -1.5) * size(); });
    expect_none(check.take());
  }
}

TEST_F(Nccl, MovesWhatItCannotAdd) {
  Tensor t = Tensor::from<uint16_t>({uint16_t(40000 + rank())}, {1}, Device::CUDA);
  EXPECT_THROW(world().all_reduce(t), Error);
  Tensor all = Tensor::zeros({size()}, DType::U16, Device::CUDA);
  world().all_gather(t, all).wait();
  for (int r = 0; r < size(); ++r) EXPECT_EQ(all.values<uint16_t>()[size_t(r)], 40000 + r);
  EXPECT_THROW(world().all_reduce(Tensor::zeros({4}, DType::F32, Device::CPU)), Error);
}

// The GPU is busy for milliseconds before the 256 MiB can even start; the host is back at once.
TEST_F(Nccl, HostDoesNotWait) {
  Tensor x = gpu(1 << 26, 1);
  world().all_reduce(x).wait();  // NCCL connects the ranks when they first need it
  double best = 1;
  bool busy = false;
  for (int attempt = 0; attempt < 5; ++attempt) {
    world().barrier();
    k().fill(x, rank());
    keep_busy(200);
    auto start = Clock::now();
    world().all_reduce(x).wait();
    double seconds = seconds_since(start);
    if (seconds >= best) continue;
    best = seconds;
    busy = cudaStreamQuery(device::stream()) == cudaErrorNotReady;
  }
  EXPECT_LT(best, 1e-3);
  EXPECT_TRUE(busy);
  expect_all(x, size() * (size() - 1) / 2);
}

// While a message waits for a rank that is late, kernels of this rank go on.
TEST_F(Nccl, KernelsRunWhileAMessageIsUnderWay) {
  constexpr auto kLate = std::chrono::milliseconds(500);
  Tensor x = gpu(1000, rank()), y = gpu(1000, 1);
  world().all_reduce(gpu(1000, 0)).wait();
  world().barrier();
  auto start = Clock::now();
  if (rank() == size() - 1) std::this_thread::sleep_for(kLate);
  Work sum = world().all_reduce(x);
  k().add_into(y, y);
  device::synchronize();
  if (rank() < size() - 1) {
    EXPECT_LT(seconds_since(start), 0.4);
  }
  sum.wait();
  expect_all(y, 2);
  expect_all(x, size() * (size() - 1) / 2);
  EXPECT_GT(seconds_since(start), 0.4);
}

// Work owns its buffers: their last owner may let go before the operation has begun.
TEST_F(Nccl, BuffersOutliveTheirOwners) {
  constexpr int64_t kEach = 1 << 20;
  for (int i = 0; i < 20; ++i) {
    keep_busy(5);
    Tensor whole = gpu(kEach * size(), -1), shard = gpu(kEach, rank() + i);
    Work work = world().all_gather(shard, whole);
    shard = {};
    std::vector<Tensor> takers;  // whoever asks for memory of that size now must not get it
    for (int j = 0; j < 4; ++j) takers.push_back(gpu(kEach, -2));
    work.wait();
    for (int r = 0; r < size(); ++r) expect_all(whole.flat(r * kEach, 100), r + i);
    expect_all(takers[0].flat(0, 100), -2);
  }
}

// wait() orders what comes after it in the rank's stream, however far the host has run ahead.
TEST_F(Nccl, ResultsAreThereForTheNextKernel) {
  constexpr int kSteps = 300;
  Tensor total = gpu(50'000, 0);
  for (int step = 0; step < kSteps; ++step) {
    Tensor x = gpu(50'000, rank() + step);
    Work sum = world().all_reduce(x);
    if (step % 50 == 0) keep_busy(10);
    sum.wait();
    k().add_into(total, x);
  }
  int n = size();
  expect_all(total, double(kSteps) * n * (n - 1) / 2 + double(n) * kSteps * (kSteps - 1) / 2);
}

// Two groups for each rank, one after the other on every rank, many times without waiting.
TEST_F(Nccl, GroupsTakeTurns) {
  auto pair = world().split(rank() / 2, rank(), "pair");
  auto across = world().split(rank() % 2, rank(), "across");
  constexpr int kMany = 100;
  std::vector<Tensor> in_pair, in_across;
  std::vector<Work> works;
  for (int i = 0; i < kMany; ++i) {
    in_pair.push_back(gpu(1000 + i, i));
    works.push_back(pair->all_reduce(in_pair.back()));
    in_across.push_back(gpu(1000 + i, i));
    works.push_back(across->all_reduce(in_across.back()));
  }
  for (Work& work : works) work.wait();
  for (int i = 0; i < kMany; ++i) {
    expect_all(in_pair[size_t(i)], i * pair->size());
    expect_all(in_across[size_t(i)], i * across->size());
  }
}

// A captured step moves data again when it is replayed; the watch leaves it alone.
TEST_F(Nccl, OperationsCanBeCaptured) {
  Tensor x = gpu(1000, 1);
  world().all_reduce(x).wait();
  k().fill(x, 1);
  device::synchronize();
  cudaGraph_t graph = nullptr;
  check(cudaStreamBeginCapture(device::stream(), cudaStreamCaptureModeThreadLocal));
  Work sum = world().all_reduce(x);
  std::this_thread::sleep_for(std::chrono::milliseconds(100));  // the watch looks meanwhile
  sum.wait();
  check(cudaStreamEndCapture(device::stream(), &graph));
  cudaGraphExec_t replay = nullptr;
  check(cudaGraphInstantiate(&replay, graph, 0));
  for (int i = 0; i < 3; ++i) check(cudaGraphLaunch(replay, device::stream()));
  expect_all(x, double(size()) * size() * size());
  check(cudaGraphExecDestroy(replay));
  check(cudaGraphDestroy(graph));
}

}  // namespace
}  // namespace lockstep
