// The suite as a whole, and every operation with every type and size.

#include "tests/comm_contract.h"

#include <algorithm>

namespace lockstep {

void Checker::expect_refusal(const std::string& what, const std::function<void()>& action,
                             const std::vector<std::string>& parts) {
  try {
    action();
  } catch (const Error& e) {
    for (const std::string& part : parts)
      expect(std::string(e.what()).find(part) != std::string::npos,
             text(what, ": \"", e.what(), "\" does not say \"", part, "\""));
    return;
  }
  expect(false, text(what, " was not refused"));
}

namespace {

// What rank r holds at place i: from -5 to 5, so that 8 ranks add up to no more than 40.
double value(int rank, int64_t i) { return double((rank * 7 + i * 3 + rank * i) % 11) - 5; }

// One type and size, all operations.
class Values {
 public:
  Values(Communicator& comm, Device device, DType t, int64_t n)
      : comm_(comm),
        device_(device),
        t_(t),
        n_(n),
        rank_(comm.rank()),
        size_(comm.size()),
        check_(comm) {}

  Complaints run() {
    all_reduce(ReduceOp::Sum);
    all_reduce(ReduceOp::Max);
    for (int root : {0, size_ - 1, size_ / 2}) {
      reduce(root);
      broadcast(root);
      gather(root);
      scatter(root);
    }
    all_gather();
    reduce_scatter(ReduceOp::Sum);
    reduce_scatter(ReduceOp::Max);
    all_to_all();
    if (size_ > 1) exchange();
    return check_.take();
  }

 private:
  Tensor mine(int64_t count) const {
    return filled(t_, {count}, device_, [&](int64_t i) { return value(rank_, i); });
  }
  Tensor rubbish(int64_t count) const {
    return filled(t_, {count}, device_, [](int64_t) { return 77; });
  }
  double total(int64_t i, ReduceOp op = ReduceOp::Sum) const {
    double out = value(0, i);
    for (int r = 1; r < size_; ++r)
      out = op == ReduceOp::Sum ? out + value(r, i) : std::max(out, value(r, i));
    return out;
  }
  std::string name(const char* what, const std::string& more = "") const {
    return text(what, " of ", n_, more);
  }

  void all_reduce(ReduceOp op) {
    Tensor buffer = mine(n_);
    comm_.all_reduce(buffer, op).wait();
    check_.expect_values(name("all_reduce"), buffer, [&](int64_t i) { return total(i, op); });
  }
  void reduce(int root) {
    Tensor buffer = mine(n_);
    comm_.reduce(buffer, root).wait();
    check_.expect_values(name("reduce", text(", root ", root)), buffer, [&](int64_t i) {
      return rank_ == root ? total(i) : value(rank_, i);  // others' buffers stay
    });
  }
  void broadcast(int root) {
    Tensor buffer = mine(n_);
    comm_.broadcast(buffer, root).wait();
    check_.expect_values(name("broadcast", text(", root ", root)), buffer,
                         [&](int64_t i) { return value(root, i); });
  }
  void gather(int root) {
    for (bool in_place : {false, true}) {
      Tensor whole = rank_ == root ? rubbish(n_ * size_) : Tensor();
      Tensor shard = mine(n_);
      if (in_place && rank_ == root) {
        copy(whole.flat(rank_ * n_, n_), shard);
        shard = whole.flat(rank_ * n_, n_);
      }
      comm_.gather(shard, whole, root).wait();
      if (rank_ != root) continue;
      check_.expect_values(name("gather", in_place ? " in place" : ""), whole,
                           [&](int64_t i) { return value(int(i / n_), i % n_); });
    }
  }
  void scatter(int root) {
    for (bool in_place : {false, true}) {
      Tensor whole = rank_ == root ? mine(n_ * size_) : Tensor();
      bool inside = in_place && rank_ == root;
      Tensor shard = inside ? whole.flat(rank_ * n_, n_) : rubbish(n_);
      comm_.scatter(whole, shard, root).wait();
      check_.expect_values(name("scatter", in_place ? " in place" : ""), shard,
                           [&](int64_t i) { return value(root, rank_ * n_ + i); });
    }
  }
  void all_gather() {
    for (bool in_place : {false, true}) {
      Tensor whole = rubbish(n_ * size_), shard = mine(n_);
      if (in_place) {
        copy(whole.flat(rank_ * n_, n_), shard);
        shard = whole.flat(rank_ * n_, n_);
      }
      comm_.all_gather(shard, whole).wait();
      check_.expect_values(name("all_gather", in_place ? " in place" : ""), whole,
                           [&](int64_t i) { return value(int(i / n_), i % n_); });
    }
  }
  void reduce_scatter(ReduceOp op) {
    for (bool in_place : {false, true}) {
      Tensor whole = mine(n_ * size_);
      Tensor shard = in_place ? whole.flat(rank_ * n_, n_) : rubbish(n_);
      comm_.reduce_scatter(whole, shard, op).wait();
      check_.expect_values(name("reduce_scatter", in_place ? " in place" : ""), shard,
                           [&](int64_t i) { return total(rank_ * n_ + i, op); });
    }
  }

  // Uneven rows of three elements, many of them none; rank s sends rows(s, r) of them to rank r.
  int64_t rows(int s, int r) const { return (s + 2 * r) % 3 * n_ / 8; }
  void all_to_all() {
    std::vector<int64_t> sends, receives;
    int64_t sent = 0, received = 0;
    for (int r = 0; r < size_; ++r) {
      sends.push_back(rows(rank_, r)), receives.push_back(rows(r, rank_));
      sent += sends.back(), received += receives.back();
    }
    Tensor to = mine(sent * 3).view({sent, 3}), from = rubbish(received * 3).view({received, 3});
    comm_.all_to_all(to, sends, from, receives).wait();
    std::vector<double> expected;
    for (int s = 0; s < size_; ++s) {
      int64_t first = 0;
      for (int r = 0; r < rank_; ++r) first += 3 * rows(s, r);
      for (int64_t i = 0; i < 3 * rows(s, rank_); ++i) expected.push_back(value(s, first + i));
    }
    check_.expect_values(name("all_to_all"), from, [&](int64_t i) { return expected[size_t(i)]; });
  }

  // To both neighbours at once, and two messages to the right one: they match in posting order.
  void exchange() {
    int right = (rank_ + 1) % size_, left = (rank_ + size_ - 1) % size_;
    Tensor buffer = mine(3 * n_);
    Tensor from_left = rubbish(n_), second = rubbish(n_), from_right = rubbish(n_);
    comm_
        .exchange({{P2P::Send, right, buffer.flat(0, n_)},
                   {P2P::Receive, left, from_left},
                   {P2P::Send, right, buffer.flat(n_, n_)},
                   {P2P::Receive, left, second}})
        .wait();
    comm_.exchange({{P2P::Receive, right, from_right}, {P2P::Send, left, buffer.flat(2 * n_, n_)}})
        .wait();
    check_.expect_values(name("exchange"), from_left, [&](int64_t i) { return value(left, i); });
    check_.expect_values(name("exchange, second message"), second,
                         [&](int64_t i) { return value(left, n_ + i); });
    check_.expect_values(name("exchange to the left"), from_right,
                         [&](int64_t i) { return value(right, 2 * n_ + i); });
  }

  Communicator& comm_;
  Device device_;
  DType t_;
  int64_t n_;
  int rank_, size_;
  Checker check_;
};

void append(Complaints& all, const Complaints& more) {
  all.insert(all.end(), more.begin(), more.end());
}

}  // namespace

Complaints check_values(Communicator& world, Device device) {
  Complaints all;
  for (DType t : kMessageTypes)
    for (int64_t n : {0, 1, 3, 1000, 65537}) append(all, Values(world, device, t, n).run());
  return all;
}

Complaints check_contract(Communicator& world, const Contract& contract) {
  Complaints all;
  Device device = contract.device;
  for (auto check :
       {c1_broadcast, c2_reduce, c3_all_reduce, c4_gather, c5_scatter, c6_reduce_scatter,
        c10_all_to_all_twice, check_values, check_groups, check_many_in_flight, check_ledger,
        check_misuse, check_buffers_are_free, check_lag})
    append(all, check(world, device));
  append(all, c9_all_reduce_is_reduce_scatter_and_all_gather(world, contract));
  append(all, check_repeats(world, contract));
  if (contract.rank_order) {
    append(all, check_rank_order(world, contract));
    append(all, check_sixteen_bit_sums(world, device));
  }
  return all;
}

}  // namespace lockstep
