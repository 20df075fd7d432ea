#pragma once
// A communicator whose messages take as long as the test says: two ranks, of which the other one is
// made up. all_reduce(t) is under way for as many milliseconds as t's first element says, whatever
// this rank does meanwhile; nothing else can be called.

#include <thread>

#include "common/operation_times.h"

namespace lockstep {

class SlowCommunicator : public Communicator {
 public:
  explicit SlowCommunicator(std::shared_ptr<Ledger> ledger, std::string name = "dp", int size = 2)
      : Communicator(0, size, std::move(name), std::vector<int>(size_t(size)), std::move(ledger),
                     {}) {}
  const char* backend() const override { return "slow"; }

  Work slow(double milliseconds, int64_t elements = 1) {
    Tensor t = Tensor::zeros({elements}, DType::F32, Device::CPU);
    t.data<float>()[0] = float(milliseconds);
    return all_reduce(t);
  }
  bool measured = false;  // was the last operation?

 protected:
  using Clock = Stretch::Clock;
  class State : public Work::State {
   public:
    State(std::shared_ptr<OperationTimes> times, Clock::time_point end) : times_(times), end_(end) {
      if (!times_) return;
      times_->under_way.emplace().start(Device::CPU);
      times_->under_way->end = end;
    }
    void wait() override { std::this_thread::sleep_until(end_); }

   private:
    std::shared_ptr<OperationTimes> times_;
    Clock::time_point end_;
  };
  Pending do_all_reduce(const Tensor& t, ReduceOp) override {
    measured = times() != nullptr;
    auto length = std::chrono::microseconds(int64_t(1000 * t.data<float>()[0]));
    return std::make_unique<State>(times(), Clock::now() + length);
  }
  [[noreturn]] static void no() { fail("only all_reduce"); }
  Pending do_reduce(const Tensor&, int, ReduceOp) override { no(); }
  Pending do_broadcast(const Tensor&, int) override { no(); }
  Pending do_all_gather(const Tensor&, const Tensor&) override { no(); }
  Pending do_reduce_scatter(const Tensor&, const Tensor&, ReduceOp) override { no(); }
  Pending do_gather(const Tensor&, const Tensor&, int) override { no(); }
  Pending do_scatter(const Tensor&, const Tensor&, int) override { no(); }
  Pending do_all_to_all(const Tensor&, const std::vector<int64_t>&, const Tensor&,
                        const std::vector<int64_t>&) override {
    no();
  }
  Pending do_exchange(const std::vector<P2P>&) override { no(); }
  void do_barrier() override { std::this_thread::sleep_for(std::chrono::milliseconds(20)); }
  std::unique_ptr<Communicator> do_split(const Members&, const std::string&) override { no(); }
  std::vector<std::string> exchange_texts(std::string_view, const std::string&) override { no(); }
};

}  // namespace lockstep
