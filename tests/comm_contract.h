#pragma once
// What every backend promises, as one suite: ranks as threads, as MPI processes and as GPUs run the
// same functions. Each is called by all ranks and returns this rank's complaints, so that it works
// where a test framework cannot look (another thread, another process). Elements are whole numbers
// small enough to be exact in every type; the answer is a formula.

#include <cmath>
#include <cstring>
#include <functional>
#include <string>
#include <vector>

#include "common/comm.h"

namespace lockstep {

using Complaints = std::vector<std::string>;

struct Contract {
  Device device = Device::CPU;
  bool rank_order = true;  // sums add in rank order, whatever the size of the message …
  bool reduce_too = true;  // … also those that only one rank gets
};

// All that needs no option of the Communicator. (Also what the lines below run one by one.)
Complaints check_contract(Communicator& world, const Contract& contract);

// The sources' examples, in the first three ranks of `world`; nothing where there are fewer.
Complaints c1_broadcast(Communicator& world, Device device);
Complaints c2_reduce(Communicator& world, Device device);
Complaints c3_all_reduce(Communicator& world, Device device);
Complaints c4_gather(Communicator& world, Device device);
Complaints c5_scatter(Communicator& world, Device device);
Complaints c6_reduce_scatter(Communicator& world, Device device);
Complaints c9_all_reduce_is_reduce_scatter_and_all_gather(Communicator& world, Contract contract);
Complaints c10_all_to_all_twice(Communicator& world, Device device);

Complaints check_values(Communicator& world, Device device);  // operations × types × sizes
Complaints check_groups(Communicator& world, Device device);
Complaints check_many_in_flight(Communicator& world, Device device);
Complaints check_repeats(Communicator& world, Contract contract);       // the same bits every time
Complaints check_rank_order(Communicator& world, Contract contract);    // bit for bit
Complaints check_sixteen_bit_sums(Communicator& world, Device device);  // fp32, rounded once
Complaints check_ledger(Communicator& world, Device device);
Complaints check_misuse(Communicator& world, Device device);
Complaints check_buffers_are_free(Communicator& world, Device device);
Complaints check_lag(Communicator& world, Device device);

// These need a world with the option check_calls, and one with check_buffers.
Complaints check_agreement(Communicator& world, Device device);
Complaints check_unchanged_buffers(Communicator& world, Device device);

// ---- how they are written ----

template <class F>
auto with_message_type(DType t, F&& f) {
  switch (t) {
    case DType::F32: return f(float{});
    case DType::BF16: return f(bf16{});
    case DType::F16: return f(fp16{});
    case DType::I32: return f(int32_t{});
    default: fail(text("the contract has no messages of ", name_of(t)));
  }
}
inline constexpr DType kMessageTypes[] = {DType::F32, DType::BF16, DType::F16, DType::I32};

template <class T>
T from_double(double value) {
  if constexpr (std::is_same_v<T, int32_t>) {
    return int32_t(value);
  } else {
    return T(float(value));
  }
}

// Element i is f(i).
template <class F>
Tensor filled(DType t, Shape shape, Device device, F&& f) {
  return with_message_type(t, [&](auto zero) {
    using T = decltype(zero);
    std::vector<T> values(size_t(elements(shape)));
    for (size_t i = 0; i < values.size(); ++i) values[i] = from_double<T>(f(int64_t(i)));
    return Tensor::from(values, shape, device, Category::Buffers);
  });
}

class Checker {
 public:
  explicit Checker(Communicator& comm) : comm_(comm) {}

  void expect(bool holds, const std::string& sentence) {
    constexpr size_t kMost = 20;
    if (holds || complaints_.size() >= kMost) return;
    complaints_.push_back(text("rank ", comm_.rank(), " of ", comm_.size(), " in \"", comm_.name(),
                               "\" (", comm_.backend(), "): ", sentence));
  }

  // Element i of got must be f(i).
  template <class F>
  void expect_values(const std::string& what, const Tensor& got, F&& f) {
    with_message_type(got.dtype(), [&](auto zero) {
      using T = decltype(zero);
      std::vector<T> values = got.values<T>();
      for (size_t i = 0; i < values.size(); ++i) {
        T expected = from_double<T>(f(int64_t(i)));
        if (std::memcmp(&values[i], &expected, sizeof(T)) == 0) continue;
        expect(false, text(what, ": element ", i, " of ", values.size(), " ", name_of(got.dtype()),
                           " is ", double(values[i]), ", expected ", double(expected)));
        return;
      }
    });
  }

  // action() must throw a sentence with all of these parts.
  void expect_refusal(const std::string& what, const std::function<void()>& action,
                      const std::vector<std::string>& parts);

  Complaints take() { return std::move(complaints_); }

 private:
  Communicator& comm_;
  Complaints complaints_;
};

}  // namespace lockstep
