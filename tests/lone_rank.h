#pragma once
// One rank of a job whose mesh has one axis, alone: the others exist by number only, and send what
// it has itself. What it allocates and calls is what it would be among others, and nobody's copies
// of messages are in the account.

#include "common/mesh.h"

namespace lockstep {

class LoneRank : public Communicator {
 public:
  // All ranks are in the group `axis`, and each is alone in every other.
  LoneRank(int rank, int size, const std::string& axis = "dp", const std::string& name = "world")
      : Communicator(rank, size, name, everybody(size), std::make_shared<Ledger>(), {}),
        axis_(axis) {}
  const char* backend() const override { return "nobody"; }

 protected:
  Pending do_all_reduce(const Tensor&, ReduceOp) override { return nullptr; }
  Pending do_reduce(const Tensor&, int, ReduceOp) override { return nullptr; }
  Pending do_broadcast(const Tensor&, int) override { return nullptr; }
  Pending do_all_gather(const Tensor& shard, const Tensor& whole) override {
    for (int r = 0; r < size(); ++r) copy_to(whole.flat(r * shard.size(), shard.size()), shard);
    return nullptr;
  }
  Pending do_reduce_scatter(const Tensor& whole, const Tensor& shard, ReduceOp) override {
    copy_to(shard, whole.flat(rank() * shard.size(), shard.size()));
    return nullptr;
  }
  Pending do_gather(const Tensor&, const Tensor&, int) override { return nullptr; }
  Pending do_scatter(const Tensor&, const Tensor&, int) override { return nullptr; }
  Pending do_all_to_all(const Tensor&, const std::vector<int64_t>&, const Tensor&,
                        const std::vector<int64_t>&) override {
    return nullptr;
  }
  // A peer sends what it is sent.
  Pending do_exchange(const std::vector<P2P>& messages) override {
    for (const P2P& receive : messages)
      for (const P2P& send : messages)
        if (receive.kind == P2P::Receive && send.kind == P2P::Send && send.peer == receive.peer)
          copy_to(receive.buffer, send.buffer);
    return nullptr;
  }
  void do_barrier() override {}
  std::unique_ptr<Communicator> do_split(const Members&, const std::string& name) override {
    if (name == axis_) return std::make_unique<LoneRank>(rank(), size(), axis_, name);
    return std::make_unique<LoneRank>(0, 1, axis_, name);
  }
  std::vector<std::string> exchange_texts(std::string_view, const std::string& mine) override {
    return std::vector<std::string>(size_t(size()), mine);
  }

 private:
  std::string axis_;
  static std::vector<int> everybody(int size) {
    std::vector<int> ranks;
    for (int r = 0; r < size; ++r) ranks.push_back(r);
    return ranks;
  }
  static void copy_to(const Tensor& to, const Tensor& from) {
    if (to.raw() != from.raw()) copy(to, from);
  }
};

}  // namespace lockstep
