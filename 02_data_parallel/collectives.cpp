// The ten ways in which ranks talk, each on a handful of numbers that can be followed by eye.
//
//     ./lockstep run 02 collectives --ranks 3           ranks as threads: works in a debugger
//     ./lockstep run 02 collectives -n 3                ranks as processes, over MPI
//     ./lockstep run 02 collectives --only all_reduce   one of them
//
// Every rank starts with its number plus one, five times (as the Playbook's appendix does), shows
// what it holds, calls the operation, and shows what it holds then.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <cstring>

#include "02_data_parallel/ring_all_reduce.h"
#include "common/device.h"
#include "common/launch_flags.h"

using namespace lockstep;

static std::string numbers(const Tensor& t) {
  if (!t.defined()) return "nothing";
  std::string out = "[";
  for (float x : t.values<float>()) out += text(out.size() > 1 ? ", " : "", x);
  return out + "]";
}

// Rank 0 prints what every rank says, in order: the words travel by a gather.
static void show(Communicator& world, const char* when, const Tensor& t) {
  constexpr int64_t kRoom = 512;
  Tensor words = Tensor::zeros({kRoom}, DType::U8, Device::CPU);
  std::string mine = numbers(t).substr(0, kRoom - 1);
  std::memcpy(words.raw(), mine.data(), mine.size());
  words = words.to(t.defined() ? t.device() : Device::CPU);
  Tensor all;
  if (world.rank() == 0) all = Tensor::empty({world.size() * kRoom}, DType::U8, words.device());
  world.gather(words, all, 0).wait();
  if (world.rank() != 0) return;
  std::vector<uint8_t> lines = all.values<uint8_t>();
  for (int r = 0; r < world.size(); ++r)
    std::printf("  %-6s rank %d  %s\n", when, r,
                reinterpret_cast<char*>(&lines[size_t(r * kRoom)]));
}

class Demo {
 public:
  Demo(Communicator& world, Device device, std::string only)
      : world_(world),
        device_(device),
        only_(std::move(only)),
        n_(world.size()),
        me_(world.rank()) {}

  void run() {
    float mine = float(me_ + 1);
    operation("broadcast", "rank 0's numbers reach all", [&] {
      Tensor t = me_ == 0 ? tensor({1, 2, 3, 4, 5}) : tensor({0, 0, 0, 0, 0});
      return change(t, [&] {
        world_.broadcast(t, 0).wait();
        return t;
      });
    });
    operation("reduce", "the sum reaches rank 0, the others keep theirs", [&] {
      Tensor t = five(mine);
      return change(t, [&] {
        world_.reduce(t, 0).wait();
        return t;
      });
    });
    operation("all_reduce", "the sum reaches all", [&] {
      Tensor t = five(mine);
      return change(t, [&] {
        world_.all_reduce(t).wait();
        return t;
      });
    });
    operation("gather", "rank 0 gets everybody's numbers", [&] {
      Tensor t = five(mine), all = me_ == 0 ? room(5 * n_) : Tensor();
      return change(t, [&] {
        world_.gather(t, all, 0).wait();
        return all;
      });
    });
    operation("all_gather", "all get everybody's numbers", [&] {
      Tensor t = five(mine), all = room(5 * n_);
      return change(t, [&] {
        world_.all_gather(t, all).wait();
        return all;
      });
    });
    operation("scatter", "rank 0 deals its numbers out", [&] {
      Tensor all, part = room(5);
      if (me_ == 0) all = tensor(blocks());
      return change(all, [&] {
        world_.scatter(all, part, 0).wait();
        return part;
      });
    });
    // row j of rank i holds [i + 1, 2 (i + 1)] to the power j + 1: rank j gets the sum of rows j
    operation("reduce_scatter", "each rank gets its part of the sum", [&] {
      Tensor all = tensor(powers()), part = room(2);
      return change(all, [&] {
        world_.reduce_scatter(all, part).wait();
        return part;
      });
    });
    operation("all_to_all", "part j of rank i goes to place i of rank j", [&] {
      std::vector<float> values;
      for (int j = 0; j < n_; ++j) values.push_back(float(10 * me_ + j));
      Tensor send = tensor(values).view({n_, 1}), recv = room(n_).view({n_, 1});
      std::vector<int64_t> ones(size_t(n_), 1);
      return change(send, [&] {
        world_.all_to_all(send, ones, recv, ones).wait();
        return recv;
      });
    });
    operation("send_receive", "to the next rank, from the previous one, posted together", [&] {
      Tensor t = five(mine), got = room(5);
      int next = (me_ + 1) % n_, previous = (me_ + n_ - 1) % n_;
      return change(t, [&] {
        if (n_ == 1) return t;
        world_.exchange({{P2P::Send, next, t}, {P2P::Receive, previous, got}}).wait();
        return got;
      });
    });
    operation("ring", "an all_reduce by hand: ring_all_reduce.h", [&] {
      Tensor t = five(mine);
      return change(t, [&] {
        ring_all_reduce(world_, t);
        return t;
      });
    });
    operation("barrier", "nobody goes on before all have come", [&] {
      Tensor t = five(mine);
      return change(t, [&] {
        world_.barrier();
        return t;
      });
    });
  }

  bool found() const { return found_; }

 private:
  struct Change {
    Tensor before, after;
  };
  template <class Call>
  Change change(const Tensor& t, Call&& call) {
    show(world_, "before", t);
    return {t, call()};
  }
  template <class Body>
  void operation(const char* name, const char* what, Body&& body) {
    if (!only_.empty() && only_ != name) return;
    found_ = true;
    if (me_ == 0) std::printf("\n%s: %s\n", name, what);
    show(world_, "after", body().after);
  }
  Tensor tensor(const std::vector<float>& values) {
    return Tensor::from(values, {int64_t(values.size())}, device_);
  }
  Tensor five(float value) { return tensor(std::vector<float>(5, value)); }
  Tensor room(int64_t n) { return Tensor::zeros({n}, DType::F32, device_); }
  std::vector<float> blocks() const {
    std::vector<float> all;
    for (int r = 0; r < n_; ++r) all.insert(all.end(), 5, float(r + 1));
    return all;
  }
  std::vector<float> powers()
      const {  // [[1, 2], [1, 4], [1, 8]] on rank 0; see C6 in tests/README.md
    std::vector<float> all;
    for (int j = 0; j < n_; ++j)
      for (int base : {me_ + 1, 2 * (me_ + 1)}) all.push_back(std::pow(float(base), float(j + 1)));
    return all;
  }

  Communicator& world_;
  Device device_;
  std::string only_;
  int n_, me_;
  bool found_ = false;
};

int main(int argc, char** argv) {
  return run_main(argc, argv, [](int argc, char** argv) {
    std::string only;
    auto launch = parse_launch(argc, argv, "Shows the collective operations.", [&](CLI::App& app) {
      app.add_option("--only", only, "one operation, e.g. all_reduce");
    });
    if (!launch) return 0;
    return run_ranks(*launch, [&](Communicator& world) {
      Demo demo(world, launch->device, only);
      demo.run();
      require(
          demo.found(), "--only ", only, " is no operation: use broadcast, reduce, all_reduce, ",
          "gather, all_gather, scatter, reduce_scatter, all_to_all, send_receive, ring or barrier");
    });
  });
}
