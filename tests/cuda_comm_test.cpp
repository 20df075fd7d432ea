// Ranks as threads that share a GPU: the same promises as on the CPU and the same bits, with every
// rank on a stream of its own.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>

#include "common/device.h"
#include "common/device_cuda.h"
#include "common/kernels.h"
#include "common/random.h"
#include "common/ranks.h"
#include "common/reduce.h"
#include "tests/comm_contract.h"

namespace lockstep {
namespace {

template <class T>
std::vector<T> where_there_is_a_gpu(std::vector<T> values) {
  return device::available() ? values : std::vector<T>{};
}

void expect_none(const Complaints& complaints) {
  for (const std::string& sentence : complaints) ADD_FAILURE() << sentence;
}

// ---- The sum, against the CPU's ----

class CudaReduce : public ::testing::TestWithParam<DType> {};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CudaReduce);
INSTANTIATE_TEST_SUITE_P(Cuda, CudaReduce,
                         ::testing::ValuesIn(where_there_is_a_gpu<DType>(
                             {DType::F64, DType::F32, DType::BF16, DType::F16, DType::I64,
                              DType::I32, DType::U16, DType::U8})),
                         [](const auto& info) { return std::string(name_of(info.param)); });

// Of many magnitudes, so that the order of a sum shows in its bits, but never so large that
// infinity and its negative could meet, since the sign of NaN is anybody's.
template <class T>
Tensor numbers(int rank, int64_t n) {
  RandomStream stream(17, text("part ", rank));
  std::vector<T> values;
  for (int64_t i = 0; i < n; ++i) {
    double x = stream.normal(uint64_t(i)) * std::exp2(double((i * 7 + rank * 5) % 22) - 14);
    if constexpr (std::is_integral_v<T>) {
      values.push_back(T(int64_t(x * 1000)));
    } else if constexpr (std::is_same_v<T, double>) {
      values.push_back(x);
    } else {
      values.push_back(T(float(x)));
    }
  }
  return Tensor::from(values, {n});
}

Tensor numbers_of(DType t, int rank, int64_t n) {
  switch (t) {
    case DType::F64: return numbers<double>(rank, n);
    case DType::F32: return numbers<float>(rank, n);
    case DType::BF16: return numbers<bf16>(rank, n);
    case DType::F16: return numbers<fp16>(rank, n);
    case DType::I64: return numbers<int64_t>(rank, n);
    case DType::I32: return numbers<int32_t>(rank, n);
    case DType::U16: return numbers<uint16_t>(rank, n);
    case DType::U8: return numbers<uint8_t>(rank, n);
  }
  fail("unknown element type");
}

// The parts begin `shift` elements behind an aligned address; the sum goes where the last one was.
void expect_the_bits_of_the_cpu(DType t, int ranks, int64_t n, int64_t shift, ReduceOp op) {
  std::vector<Tensor> host, gpu;
  std::vector<const std::byte*> host_parts, gpu_parts;
  for (int r = 0; r < ranks; ++r) {
    host.push_back(numbers_of(t, r, n + shift).flat(shift, n));
    gpu.push_back(numbers_of(t, r, n + shift).to(Device::CUDA).flat(shift, n));
    host_parts.push_back(host.back().raw());
    gpu_parts.push_back(gpu.back().raw());
  }
  reduce_in_rank_order(host.back().raw(), host_parts, n, t, op);
  cuda::reduce_in_rank_order(gpu.back(), gpu_parts, op);
  Tensor got = gpu.back().to(Device::CPU);
  device::synchronize();
  EXPECT_EQ(std::memcmp(got.raw(), host.back().raw(), size_t(got.bytes())), 0)
      << n << " " << name_of(t) << " of " << ranks << " ranks, shifted by " << shift
      << (op == ReduceOp::Sum ? ", sum" : ", maximum");
}

TEST_P(CudaReduce, HasTheBitsOfTheCpu) {
  for (ReduceOp op : {ReduceOp::Sum, ReduceOp::Max})
    for (int64_t shift : {0, 1})
      for (int64_t n : {0, 1, 15, 1000, 4096, 10007}) {
        for (int ranks : {1, 3, 8}) expect_the_bits_of_the_cpu(GetParam(), ranks, n, shift, op);
        expect_the_bits_of_the_cpu(GetParam(), 64, std::min<int64_t>(n, 100), shift, op);
      }
}

TEST_P(CudaReduce, RefusesMoreRanksThanItHasRoomFor) {
  Tensor t = Tensor::zeros({4}, GetParam(), Device::CUDA);
  std::vector<const std::byte*> parts(65, t.raw());
  EXPECT_THROW(cuda::reduce_in_rank_order(t, parts, ReduceOp::Sum), Error);
}

// ---- Ranks ----

class CudaThreads : public ::testing::TestWithParam<int> {
 protected:
  void run(const std::function<void(Communicator&)>& body, Communicator::Options options = {}) {
    run_threads(GetParam(), Device::CUDA, options, body);
  }
};
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(CudaThreads);
INSTANTIATE_TEST_SUITE_P(Cuda, CudaThreads,
                         ::testing::ValuesIn(where_there_is_a_gpu<int>({1, 2, 4, 8})),
                         [](const auto& info) { return text(info.param, "_ranks"); });

TEST_P(CudaThreads, C12_KeepsTheContractOfAllBackends) {
  run([](Communicator& world) { expect_none(check_contract(world, {.device = Device::CUDA})); });
}

TEST_P(CudaThreads, KeepTheContractWithPoisonedMemory) {
  run([](Communicator& world) {
    memory_account()->poison = true;
    expect_none(check_values(world, Device::CUDA));
    expect_none(check_many_in_flight(world, Device::CUDA));
  });
}

TEST_P(CudaThreads, AgreeBeforeEachCall) {
  run([](Communicator& world) { expect_none(check_agreement(world, Device::CUDA)); },
      {.check_calls = true});
}

TEST_P(CudaThreads, FindChangedBuffers) {
  run([](Communicator& world) { expect_none(check_unchanged_buffers(world, Device::CUDA)); },
      {.check_buffers = true});
}

// Copies are freed by the last rank that is done with them, while the streams of the others may lag
// far behind: rank 0's has long work in front of every step. Memory that were given away too early
// would be overwritten by the next steps, which use blocks of the same sizes.
TEST_P(CudaThreads, MemoryIsFreedBehindTheSlowestReader) {
  run([](Communicator& world) {
    const Kernels& k = kernels(Device::CUDA);
    auto gpu = [](int64_t n) { return Tensor::empty({n}, DType::F32, Device::CUDA); };
    constexpr int kSteps = 60;
    constexpr int64_t kMost = 1 << 18;
    Tensor total = Tensor::zeros({kMost}, DType::F32, Device::CUDA), ballast = gpu(1 << 26);
    for (int step = 0; step < kSteps; ++step) {
      if (world.rank() == step % world.size())
        for (int i = 0; i < 5; ++i) k.fill(ballast, i);
      Tensor x = gpu(kMost), whole = gpu(kMost * world.size());
      k.fill(x, world.rank() + step);
      world.all_gather(x, whole).wait();
      k.fill(x, -1);
      for (int r = 0; r < world.size(); ++r) k.add_into(total, whole.flat(r * kMost, kMost));
    }
    int n = world.size();
    double expected = double(kSteps) * n * (n - 1) / 2 + double(n) * kSteps * (kSteps - 1) / 2;
    for (float got : total.values<float>()) ASSERT_EQ(got, expected);
  });
}

// The host waits until all ranks have posted, but not for the GPU.
TEST_P(CudaThreads, HostDoesNotWaitForTheGpu) {
  run([](Communicator& world) {
    const Kernels& k = kernels(Device::CUDA);
    Tensor x = Tensor::empty({1 << 20}, DType::F32, Device::CUDA);
    Tensor ballast = Tensor::empty({1 << 28}, DType::F32, Device::CUDA);
    k.fill(x, world.rank());
    world.all_reduce(x).wait();  // whatever is done once, is done
    device::synchronize();
    world.barrier();
    for (int i = 0; i < 100; ++i) k.fill(ballast, i);  // at least 20 ms
    world.all_reduce(x).wait();
    EXPECT_EQ(cudaStreamQuery(device::stream()), cudaErrorNotReady);
    int n = world.size();
    for (float got : x.values<float>()) ASSERT_EQ(got, double(n) * n * (n - 1) / 2);
  });
}

}  // namespace
}  // namespace lockstep
