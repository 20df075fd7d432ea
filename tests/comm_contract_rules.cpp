// What goes beyond one operation at a time: groups, many in flight, the order of sums, the ledger,
// refusals, and ranks that come late.

#include <chrono>
#include <thread>

#include "common/random.h"
#include "tests/comm_contract.h"

namespace lockstep {
namespace {

// The ranks of `group`, as bits: every rank adds its own.
int members(Communicator& group, int world_rank, Device device) {
  Tensor bits = Tensor::from<int32_t>({1 << world_rank}, {1}, device, Category::Buffers);
  group.all_reduce(bits).wait();
  return bits.values<int32_t>()[0];
}

Tensor noise(int rank, DType t, int64_t n, Device device) {
  RandomStream stream(13, text("rank ", rank));
  return filled(t, {n}, device, [&](int64_t i) { return stream.normal(uint64_t(i)); });
}

}  // namespace

Complaints check_groups(Communicator& world, Device device) {
  Checker check(world);
  int rank = world.rank(), size = world.size(), parity = rank % 2;

  auto same_parity = world.split(parity, rank, "parity");
  int expected = 0;
  for (int r = parity; r < size; r += 2) expected |= 1 << r;
  check.expect(members(*same_parity, rank, device) == expected, "the group of its parity");
  check.expect(same_parity->rank() == rank / 2, "its rank in the group of its parity");
  check.expect(same_parity->name() == "parity", "the name of a group");

  auto reversed = world.split(0, -rank, "reversed");
  check.expect(reversed->size() == size && reversed->rank() == size - 1 - rank,
               text("a key of -rank reverses ranks, it became ", reversed->rank()));
  Tensor from_last = Tensor::from<int32_t>({rank}, {1}, device, Category::Buffers);
  reversed->broadcast(from_last, 0).wait();
  check.expect_values("broadcast in the reversed group", from_last,
                      [&](int64_t) { return size - 1; });

  auto nested = same_parity->split(same_parity->rank() / 2, rank, "nested");
  expected = 0;
  for (int r = 0; r < size; ++r)
    if (r % 2 == parity && r / 4 == rank / 4) expected |= 1 << r;
  check.expect(members(*nested, rank, device) == expected, "the group within a group");

  auto alone = world.split(rank, 0, "alone");
  check.expect(alone->size() == 1 && alone->rank() == 0, "a group of one");
  check.expect(members(*alone, rank, device) == 1 << rank, "the sum of one");

  // Operations of several groups under way at once do not mix.
  Tensor a = filled(DType::F32, {100}, device, [&](int64_t) { return 1; });
  Tensor b = filled(DType::F32, {100}, device, [&](int64_t) { return 1; });
  Work in_world = world.all_reduce(a), in_group = same_parity->all_reduce(b);
  in_group.wait();
  in_world.wait();
  check.expect_values("a sum in the world", a, [&](int64_t) { return size; });
  check.expect_values("a sum in a group", b, [&](int64_t) { return same_parity->size(); });
  return check.take();
}

// Launched in one order on all ranks, waited for in another order on each.
Complaints check_many_in_flight(Communicator& world, Device device) {
  constexpr int kMany = 300;
  Checker check(world);
  int rank = world.rank(), size = world.size();
  int right = (rank + 1) % size, left = (rank + size - 1) % size;
  std::vector<Work> works;
  std::vector<Tensor> results;
  auto number = [&](int64_t n, int k) {
    return filled(DType::F32, {n}, device, [&](int64_t) { return rank + k; });
  };
  for (int k = 0; k < kMany; ++k) {
    Tensor buffer = number(1 + k % 7, k), whole = number(size * buffer.size(), k);
    if (k % 4 == 0) {
      works.push_back(world.all_reduce(buffer));
    } else if (k % 4 == 1) {
      works.push_back(world.broadcast(buffer, k % size));
    } else if (k % 4 == 2) {
      works.push_back(world.reduce_scatter(whole, buffer));
    } else if (size > 1) {
      Tensor got = buffer.like();
      works.push_back(world.exchange({{P2P::Send, right, buffer}, {P2P::Receive, left, got}}));
      buffer = got;
    } else {
      works.emplace_back();
    }
    results.push_back(buffer);
  }
  for (int k = 0; k < kMany; ++k) works[size_t((k * 7 + rank * 31) % kMany)].wait();
  int ranks = size * (size - 1) / 2;
  for (int k = 0; k < kMany; ++k) {
    const int expected[] = {ranks + size * k, k % size + k, ranks + size * k, left + k};
    check.expect_values(text("operation ", k, " of many in flight"), results[size_t(k)],
                        [&](int64_t) { return expected[k % 4]; });
  }
  return check.take();
}

// Rank 0's number, plus rank 1's, plus rank 2's, …, in fp32 and rounded once: the very bits, in one
// message or in many.
Complaints check_rank_order(Communicator& world, Contract contract) {
  Checker check(world);
  Device device = contract.device;
  constexpr int64_t kEach = 4003;
  int64_t n = kEach * world.size();
  for (DType t : {DType::F32, DType::BF16, DType::F16}) {
    with_message_type(t, [&](auto zero) {
      using T = decltype(zero);
      std::vector<float> sums(size_t(n), 0);
      for (int r = 0; r < world.size(); ++r) {
        std::vector<T> theirs = noise(r, t, n, Device::CPU).template values<T>();
        for (size_t i = 0; i < sums.size(); ++i)
          sums[i] = r == 0 ? float(theirs[i]) : sums[i] + float(theirs[i]);
      }
      auto is = [&](int64_t first) {
        return [&, first](int64_t i) { return double(sums[size_t(first + i)]); };
      };
      Tensor whole = noise(world.rank(), t, n, device), pieces = whole.like();
      Tensor at_root = whole.like(), shard = whole.like({kEach});
      copy(pieces, whole), copy(at_root, whole);
      world.reduce_scatter(whole, shard).wait();
      world.all_reduce(whole).wait();
      world.reduce(at_root, 0).wait();
      for (int64_t first = 0, count = 1; first < n; first += count, count = count * 3 + 1) {
        count = std::min(count, n - first);
        world.all_reduce(pieces.flat(first, count)).wait();
      }
      check.expect_values("all_reduce in rank order", whole, is(0));
      check.expect_values("all_reduce in rank order, in buckets", pieces, is(0));
      check.expect_values("reduce_scatter in rank order", shard, is(world.rank() * kEach));
      if (world.rank() == 0 && contract.reduce_too)
        check.expect_values("reduce in rank order", at_root, is(0));
    });
  }
  return check.take();
}

// 1 and several times 2^-9: added in bf16 it stays 1, in fp32 the small ones are not lost.
Complaints check_sixteen_bit_sums(Communicator& world, Device device) {
  Checker check(world);
  int size = world.size();
  auto value = [&](int r, int64_t i) { return r == i % size ? 1.0 : 0x1p-9; };
  for (DType t : {DType::BF16, DType::F16}) {
    Tensor buffer = filled(t, {64}, device, [&](int64_t i) { return value(world.rank(), i); });
    world.all_reduce(buffer).wait();
    check.expect_values("a sum of 16-bit numbers", buffer,
                        [&](int64_t) { return 1 + (size - 1) * 0x1p-9; });
  }
  return check.take();
}

// Payload: the bytes that the operation is about. Wire: what this rank sends.
Complaints check_ledger(Communicator& world, Device device) {
  Checker check(world);
  int64_t size = world.size(), rank = world.rank();
  auto group = world.split(0, int(rank), "ledger");
  Ledger& ledger = world.ledger();
  ledger.set_phase("contract");
  auto is = [&](Collective operation, int64_t calls, int64_t payload, int64_t wire) {
    Ledger::Sum sum = ledger.sum(operation, "ledger", "contract");
    check.expect(
        sum.calls == calls && sum.payload == payload && sum.wire == wire,
        text("the ledger has ", sum.calls, " ", name_of(operation), " of ", sum.payload, " bytes, ",
             sum.wire, " on the wire; expected ", calls, ", ", payload, ", ", wire));
  };
  auto tensor = [&](int64_t n) { return Tensor::zeros({n}, DType::F32, device); };
  Tensor whole = tensor(3 * size), shard = tensor(3);
  int64_t k = whole.bytes(), part = shard.bytes(), others = size - 1;
  group->all_reduce(whole).wait();
  group->all_reduce(whole).wait();
  group->all_gather(shard, whole).wait();
  group->reduce_scatter(whole, shard).wait();
  group->broadcast(shard, 0).wait();
  group->reduce(shard, 0).wait();
  group->barrier();
  is(Collective::AllReduce, 2, 2 * k, 2 * 2 * part * others);
  is(Collective::AllGather, 1, k, part * others);
  is(Collective::ReduceScatter, 1, k, part * others);
  is(Collective::Broadcast, 1, part, size > 1 ? part : 0);
  is(Collective::Reduce, 1, part, size > 1 ? part : 0);
  is(Collective::Barrier, 1, 0, 0);

  // r+1 rows to rank r: this rank keeps its own.
  std::vector<int64_t> sends, receives(size_t(size), rank + 1);
  for (int64_t r = 0; r < size; ++r) sends.push_back(r + 1);
  int64_t sent = size * (size + 1) / 2, received = size * (rank + 1);
  Tensor to = tensor(2 * received).view({received, 2});
  group->all_to_all(tensor(2 * sent).view({sent, 2}), sends, to, receives).wait();
  is(Collective::AllToAll, 1, 8 * sent, 8 * (sent - rank - 1));
  if (size > 1) {
    int right = int((rank + 1) % size), left = int((rank + size - 1) % size);
    group->exchange({{P2P::Send, right, tensor(5)}, {P2P::Receive, left, tensor(5)}}).wait();
    is(Collective::Exchange, 1, 20, 20);
  }
  ledger.set_phase("");
  return check.take();
}

// After its own wait() a rank may write into its buffers, however late the others are.
Complaints check_buffers_are_free(Communicator& world, Device device) {
  Checker check(world);
  int size = world.size(), rank = world.rank();
  auto number = [&](int64_t n) {
    return filled(DType::F32, {n}, device, [&](int64_t) { return rank + 1; });
  };
  Tensor sum = number(1000), told = number(1000), shard = number(1000), all = number(1000 * size);
  Work works[] = {world.all_reduce(sum), world.broadcast(told, 0), world.all_gather(shard, all)};
  if (rank > 0) std::this_thread::sleep_for(std::chrono::milliseconds(20 * rank));
  for (Work& work : works) work.wait();
  zero(shard);
  if (rank == 0) {
    zero(sum), zero(told);
  } else {
    check.expect_values("a sum", sum, [&](int64_t) { return size * (size + 1) / 2; });
    check.expect_values("what rank 0 told", told, [](int64_t) { return 1; });
  }
  check.expect_values("all shards", all, [](int64_t i) { return i / 1000 + 1; });
  return check.take();
}

// A rank that comes late, but in time.
Complaints check_lag(Communicator& world, Device device) {
  Checker check(world);
  Tensor buffer = filled(DType::F32, {1000}, device, [](int64_t i) { return i; });
  if (world.rank() == world.size() - 1) std::this_thread::sleep_for(std::chrono::milliseconds(200));
  world.all_reduce(buffer).wait();
  check.expect_values("all_reduce with a late rank", buffer,
                      [&](int64_t i) { return double(i) * world.size(); });
  return check.take();
}

}  // namespace lockstep
