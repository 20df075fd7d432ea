// Four ranks that call an operation five times; at step 3 something happens to rank 2.
//
//   failing_rank HOW OPERATION RANKS [anything: found again in the list of processes]
//
// HOW: throw, abort, kill, exit, hang, lag (for less than the time limit), mismatch (two elements
// fewer). RANKS: as threads; 1 under mpirun. failure_test.cpp runs it.

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "common/options.h"
#include "common/ranks.h"

using namespace lockstep;

static Tensor some(int64_t count) {
  Tensor t = Tensor::empty({count}, DType::F32, Device::CPU, Category::Buffers);
  for (int64_t i = 0; i < count; ++i) t.data<float>()[i] = 1;
  return t;
}

static void perform(const std::string& operation, Communicator& world, int64_t count) {
  int n = world.size(), next = (world.rank() + 1) % n, last = (world.rank() + n - 1) % n;
  Tensor whole = some(count * n), shard = some(count);
  std::vector<int64_t> rows(size_t(n), count);
  if (operation == "all_reduce") world.all_reduce(shard).wait();
  if (operation == "reduce") world.reduce(shard, 0).wait();
  if (operation == "broadcast") world.broadcast(shard, 0).wait();
  if (operation == "all_gather") world.all_gather(shard, whole).wait();
  if (operation == "reduce_scatter") world.reduce_scatter(whole, shard).wait();
  if (operation == "gather") world.gather(shard, whole, 0).wait();
  if (operation == "scatter") world.scatter(whole, shard, 0).wait();
  if (operation == "all_to_all") world.all_to_all(whole, rows, some(count * n), rows).wait();
  if (operation == "exchange")
    world.exchange({{P2P::Send, next, shard}, {P2P::Receive, last, some(count)}}).wait();
  if (operation == "barrier") world.barrier();
  if (operation == "split") world.split(0, world.rank(), "again");
}

static void befall(const std::string& how) {
  if (how == "throw") fail("does not feel well");
  if (how == "abort") std::abort();
  if (how == "kill") std::raise(SIGKILL);
  if (how == "exit") std::exit(0);
  if (how == "lag") std::this_thread::sleep_for(std::chrono::milliseconds(500));
  if (how == "hang")
    while (true) pause();
}

int main(int argc, char** argv) {
  return run_main(argc, argv, [](int argc, char** argv) {
    require(argc >= 4, "usage: failing_rank HOW OPERATION RANKS");
    std::string how = argv[1], operation = argv[2];
    Launch launch;
    launch.ranks = std::atoi(argv[3]);
    launch.options.time_limit = how == "hang" ? 1 : 10;
    launch.options.check_calls = how == "mismatch";
    return run_ranks(launch, [&](Communicator& world) {
      int64_t usual = how == "mismatch" ? 409600 : 1000;
      for (int step = 0; step < 5; ++step) {
        bool now = world.rank() == 2 && step == 3;
        if (now) befall(how);
        perform(operation, world, now && how == "mismatch" ? usual - 2 : usual);
      }
      if (world.rank() == 0) std::printf("done\n");
    });
  });
}
