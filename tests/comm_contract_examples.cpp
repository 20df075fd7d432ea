// The collectives' examples of The Ultra-Scale Playbook (appendix A0, "Parallel programming crash
// course"), number for number, and two identities.

#include "common/random.h"
#include "tests/comm_contract.h"

namespace lockstep {
namespace {

// Runs check in the first three ranks; the others wait for nothing.
template <class F>
Complaints among_three(Communicator& world, F&& check) {
  if (world.size() < 3) return {};
  bool takes_part = world.rank() < 3;
  std::unique_ptr<Communicator> group = world.split(takes_part ? 0 : 1, world.rank(), "three");
  if (!takes_part) return {};
  Checker checker(*group);
  check(*group, checker);
  return checker.take();
}

// Five elements, all of them rank + 1.
Tensor fives(Communicator& comm, Device device) {
  return filled(DType::F32, {5}, device, [&](int64_t) { return comm.rank() + 1; });
}
Tensor zeros(int64_t n, Device device) {
  return Tensor::zeros({n}, DType::F32, device, Category::Buffers);
}

// Normal numbers, different on every rank: sums of them round.
Tensor noise(Communicator& comm, int64_t n, Device device) {
  RandomStream stream(11, text("rank ", comm.rank()));
  return filled(DType::F32, {n}, device, [&](int64_t i) { return stream.normal(uint64_t(i)); });
}

}  // namespace

Complaints c1_broadcast(Communicator& world, Device device) {
  return among_three(world, [&](Communicator& comm, Checker& check) {
    Tensor buffer = filled(DType::F32, {5}, device,
                           [&](int64_t i) { return comm.rank() == 0 ? double(i + 1) : 0.0; });
    comm.broadcast(buffer, 0).wait();
    check.expect_values("C1", buffer, [](int64_t i) { return i + 1; });
  });
}

Complaints c2_reduce(Communicator& world, Device device) {
  return among_three(world, [&](Communicator& comm, Checker& check) {
    Tensor buffer = fives(comm, device);
    comm.reduce(buffer, 0).wait();
    check.expect_values("C2", buffer,
                        [&](int64_t) { return comm.rank() == 0 ? 6 : comm.rank() + 1; });
  });
}

Complaints c3_all_reduce(Communicator& world, Device device) {
  return among_three(world, [&](Communicator& comm, Checker& check) {
    Tensor buffer = fives(comm, device);
    comm.all_reduce(buffer).wait();
    check.expect_values("C3", buffer, [](int64_t) { return 6; });
  });
}

Complaints c4_gather(Communicator& world, Device device) {
  return among_three(world, [&](Communicator& comm, Checker& check) {
    Tensor at_root = comm.rank() == 0 ? zeros(15, device) : Tensor();
    comm.gather(fives(comm, device), at_root, 0).wait();
    if (comm.rank() == 0)
      check.expect_values("C4 gather", at_root, [](int64_t i) { return i / 5 + 1; });
    Tensor everywhere = zeros(15, device);
    comm.all_gather(fives(comm, device), everywhere).wait();
    check.expect_values("C4 all-gather", everywhere, [](int64_t i) { return i / 5 + 1; });
  });
}

Complaints c5_scatter(Communicator& world, Device device) {
  return among_three(world, [&](Communicator& comm, Checker& check) {
    Tensor whole = filled(DType::F32, {15}, device, [](int64_t i) { return i / 5 + 1; });
    Tensor shard = zeros(5, device);
    comm.scatter(comm.rank() == 0 ? whole : Tensor(), shard, 0).wait();
    check.expect_values("C5", shard, [&](int64_t) { return comm.rank() + 1; });
  });
}

// Rank r brings, for rank j, [r+1, 2(r+1)] to the power of j+1.
Complaints c6_reduce_scatter(Communicator& world, Device device) {
  return among_three(world, [&](Communicator& comm, Checker& check) {
    Tensor whole = filled(DType::F32, {6}, device, [&](int64_t i) {
      return std::pow(double((comm.rank() + 1) * (i % 2 + 1)), double(i / 2 + 1));
    });
    Tensor shard = zeros(2, device);
    comm.reduce_scatter(whole, shard).wait();
    const double expected[3][2] = {{6, 12}, {14, 56}, {36, 288}};
    check.expect_values("C6", shard, [&](int64_t i) { return expected[comm.rank()][i]; });
  });
}

// Bitwise where sums have one order; with other backends for numbers whose sums are exact.
Complaints c9_all_reduce_is_reduce_scatter_and_all_gather(Communicator& world, Contract contract) {
  Checker check(world);
  int64_t shard_size = 1001, n = shard_size * world.size();
  Tensor input = contract.rank_order ? noise(world, n, contract.device)
                                     : filled(DType::F32, {n}, contract.device,
                                              [&](int64_t i) { return world.rank() + i % 100; });
  Tensor once = input.like(), twice = input.like(), shard = input.like({shard_size});
  copy(once, input);
  world.all_reduce(once).wait();
  world.reduce_scatter(input, shard).wait();
  world.all_gather(shard, twice).wait();
  std::vector<float> expected = once.values<float>();
  check.expect_values("C9", twice, [&](int64_t i) { return double(expected[size_t(i)]); });
  return check.take();
}

Complaints c10_all_to_all_twice(Communicator& world, Device device) {
  Checker check(world);
  int n = world.size(), rank = world.rank();
  std::vector<int64_t> rows(size_t(n), 2);
  auto value = [&](int from, int64_t i) { return from * 1000 + double(i); };
  Tensor a = filled(DType::F32, {2 * n, 4}, device, [&](int64_t i) { return value(rank, i); });
  Tensor b = a.like(), c = a.like();
  world.all_to_all(a, rows, b, rows).wait();
  check.expect_values("C10, once: the transposed", b,
                      [&](int64_t i) { return value(int(i / 8), rank * 8 + i % 8); });
  world.all_to_all(b, rows, c, rows).wait();
  check.expect_values("C10, twice", c, [&](int64_t i) { return value(rank, i); });
  return check.take();
}

Complaints check_repeats(Communicator& world, Contract contract) {
  Checker check(world);
  Tensor input = noise(world, 10'007, contract.device);
  std::vector<float> first;
  for (int run = 0; run < 3; ++run) {
    Tensor buffer = input.like();
    copy(buffer, input);
    world.all_reduce(buffer).wait();
    if (run == 0) first = buffer.values<float>();
    check.expect_values(text("run ", run, " of the same sum"), buffer,
                        [&](int64_t i) { return double(first[size_t(i)]); });
  }
  return check.take();
}

}  // namespace lockstep
