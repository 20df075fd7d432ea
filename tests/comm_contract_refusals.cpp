// What is refused, and with which sentence: wrong calls, ranks that call different things, buffers
// that change while they are being sent.

#include "tests/comm_contract.h"

namespace lockstep {

// Refused before anything is sent: all ranks go on as if nothing had happened.
Complaints check_misuse(Communicator& world, Device device) {
  Checker check(world);
  int n = world.size(), rank = world.rank();
  auto tensor = [&](Shape shape, DType t = DType::F32) {
    return Tensor::zeros(std::move(shape), t, device, Category::Buffers);
  };
  auto refuses = [&](const char* what, auto action, const std::vector<std::string>& parts) {
    check.expect_refusal(what, action, parts);
  };
  Tensor six = tensor({6}), undefined;
  refuses("a root that is no rank", [&] { world.broadcast(six, n).wait(); },
          {text("root ", n), text("0 to ", n - 1)});
  refuses("a negative root", [&] { world.reduce(six, -1).wait(); }, {"root -1"});
  refuses("an undefined tensor", [&] { world.all_reduce(undefined).wait(); },
          {"all_reduce", "undefined"});
  refuses("a whole that is no multiple", [&] { world.all_gather(six, tensor({6 * n + 1})).wait(); },
          {text(6 * n + 1), text(n, " shards of 6")});
  refuses("a shard of another size", [&] { world.reduce_scatter(six, tensor({7})).wait(); },
          {"whole of 6", "shards of 7"});
  refuses("a shard of another type",
          [&] { world.all_gather(six, tensor({6 * n}, DType::BF16)).wait(); }, {"BF16", "F32"});
  if (n > 1)
    refuses("a shard in another rank's place",
            [&] {
              Tensor whole = tensor({6 * n});
              world.all_gather(whole.flat((rank + 1) % n * 6, 6), whole).wait();
            },
            {text("rank ", rank), "place"});
  refuses("a message to itself",
          [&] {
            world.exchange({{P2P::Send, rank, six}}).wait();
          },
          {text("rank ", rank, " cannot exchange with ", rank)});
  refuses("a message to nobody",
          [&] {
            world.exchange({{P2P::Receive, n, six}}).wait();
          },
          {text("exchange with ", n), text("group of ", n)});
  std::vector<int64_t> ones(size_t(n), 1), too_many(size_t(n) + 1, 1), twos(size_t(n), 2);
  Tensor rows = tensor({n, 3});
  refuses("too many row counts",
          [&] {
            world.all_to_all(rows, too_many, tensor({n, 3}), ones).wait();
          },
          {text(n + 1)});
  refuses("rows that do not add up",
          [&] {
            world.all_to_all(rows, twos, tensor({n, 3}), ones).wait();
          },
          {text(2 * n), text("have ", n)});
  refuses("rows of another width",
          [&] {
            world.all_to_all(rows, ones, tensor({n, 4}), ones).wait();
          },
          {"12 bytes", "16 bytes"});
  refuses("an all_to_all in place", [&] { world.all_to_all(rows, ones, rows, ones).wait(); },
          {"in place"});
  refuses("a negative color", [&] { world.split(-1, 0, "none"); }, {"color -1"});

  Tensor still = filled(DType::F32, {6}, device, [](int64_t) { return 1; });
  world.all_reduce(still).wait();
  check.expect_values("after refusals", still, [&](int64_t) { return n; });
  return check.take();
}

// With check_calls: what ranks call is compared first, and all of them learn of a difference.
Complaints check_agreement(Communicator& world, Device device) {
  Checker check(world);
  int n = world.size(), rank = world.rank();
  bool odd_one = rank == n - 1;
  auto tensor = [&](int64_t size, DType t = DType::F32) {
    return Tensor::zeros({size}, t, device, Category::Buffers);
  };
  auto refuses = [&](const char* what, auto action, const std::vector<std::string>& parts) {
    if (n > 1) check.expect_refusal(what, action, parts);
  };
  refuses("unequal sizes", [&] { world.all_reduce(tensor(odd_one ? 409598 : 409600)).wait(); },
          {"all_reduce", "rank 0", "409600", text("rank ", n - 1), "409598"});
  refuses("unequal types",
          [&] { world.all_reduce(tensor(8, odd_one ? DType::BF16 : DType::F32)).wait(); },
          {"F32", "BF16"});
  refuses("unequal operations",
          [&] {
            Tensor t = tensor(8);
            (odd_one ? world.broadcast(t, 0) : world.all_reduce(t)).wait();
          },
          {"rank 0 calls all_reduce", "calls broadcast"});
  refuses("unequal roots", [&] { world.broadcast(tensor(8), odd_one ? 0 : 1).wait(); },
          {"root 0", "root 1"});
  refuses("a sum and a maximum",
          [&] { world.all_reduce(tensor(8), odd_one ? ReduceOp::Max : ReduceOp::Sum).wait(); },
          {"maximum"});
  refuses("a barrier for one, a split for others",
          [&] {
            if (odd_one) return world.barrier();
            world.split(0, 0, "some");
          },
          {"split", "barrier"});
  refuses("rows that nobody expects",
          [&] {
            std::vector<int64_t> ones(size_t(n), 1), others = ones;
            if (odd_one) ones[0] = 2;  // rank 0 expects one
            int64_t rows = odd_one ? n + 1 : n;
            world.all_to_all(tensor(rows), ones, tensor(n), others).wait();
          },
          {text("rank ", n - 1, " sends 2 rows to rank 0"), "expects 1"});

  // Messages are between two; the others need not take part in an exchange.
  Tensor message = filled(DType::F32, {4}, device, [&](int64_t i) { return rank * 10 + i; });
  if (n > 1 && rank == 0) world.exchange({{P2P::Send, 1, message}}).wait();
  if (n > 1 && rank == 1) world.exchange({{P2P::Receive, 0, message}}).wait();
  if (rank <= 1) check.expect_values("a message for two", message, [](int64_t i) { return i; });
  Tensor sum = filled(DType::F32, {4}, device, [](int64_t) { return 1; });
  world.all_reduce(sum).wait();
  check.expect_values("a sum after refusals", sum, [&](int64_t) { return n; });
  return check.take();
}

// With check_buffers: what is sent must not change before wait().
Complaints check_unchanged_buffers(Communicator& world, Device device) {
  Checker check(world);
  int n = world.size(), rank = world.rank();
  if (n == 1) return {};
  auto ones = [&](int64_t size) {
    return filled(DType::F32, {size}, device, [](int64_t) { return 1; });
  };
  for (bool change : {true, false}) {
    bool here = change && rank == n - 1;
    auto runs = [&](const char* what, const Tensor& input, auto launch) {
      auto run = [&] {
        Work work = launch();
        if (here) zero(input);
        work.wait();
      };
      if (here) {
        check.expect_refusal(what, run, {what, "its input changed between launch and wait()"});
      } else {
        run();
      }
    };
    Tensor shard = ones(1000), whole = ones(1000 * n), to_root = ones(1000);
    runs("all_gather", shard, [&] { return world.all_gather(shard, ones(1000 * n)); });
    runs("reduce_scatter", whole, [&] { return world.reduce_scatter(whole, ones(1000)); });
    runs("reduce", to_root, [&] { return world.reduce(to_root, 0); });
    int right = (rank + 1) % n, left = (rank + n - 1) % n;
    Tensor message = ones(1000);
    runs("exchange", message, [&] {
      return world.exchange({{P2P::Send, right, message}, {P2P::Receive, left, ones(1000)}});
    });
  }
  Tensor whole = ones(10 * n);  // no false alarm where input and output share memory
  world.reduce_scatter(whole, whole.flat(10 * rank, 10)).wait();
  world.all_reduce(whole).wait();
  return check.take();
}

}  // namespace lockstep
