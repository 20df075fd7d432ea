#include "common/gpu_ranks.h"

#include <cstring>

#include "common/comm_nccl.h"
#include "common/device.h"

namespace lockstep {

std::string too_many_ranks(int ranks, int gpus, const char* hostid) {
  if (ranks <= gpus) return "";
  std::string where = hostid ? text("with NCCL_HOSTID=", hostid) : "on this machine";
  return text(ranks, " ranks ", where, " would share ", gpus, " GPU", gpus == 1 ? "" : "s",
              ", but NCCL wants one for each: start at most ", gpus,
              ", or run them as threads of one process (--ranks ", ranks,
              " without mpirun), or on the CPU (--device cpu), or give each set of ", gpus,
              " ranks an NCCL_HOSTID of its own (right, but slow: their messages then take the "
              "network's way)");
}

// A color for split(): equal for equal ids (FNV-1a).
static int color_of(const char* hostid) {
  uint32_t hash = 0x811c9dc5u;
  for (const char* c = hostid ? hostid : ""; *c; ++c) hash = (hash ^ uint8_t(*c)) * 0x01000193u;
  return int(hash & 0x7fffffffu);
}

// What stands between this process and a GPU of its own; nothing, if it has one now.
static std::string take_a_gpu(Communicator& processes, int host, const char* hostid) {
  auto machine = processes.split(host, processes.rank(), "machine");
  auto set = machine->split(color_of(hostid), processes.rank(), "set");
  if (!device::available()) {
    std::string why_not = device::why_not();
    return text("ranks that talk over NCCL need a GPU each: ",
                why_not.empty() ? "this program was built without CUDA" : why_not);
  }
  std::string problem = too_many_ranks(set->size(), device::count(), hostid);
  if (problem.empty()) device::use(set->rank());
  return problem;
}

// If any rank has a problem, all throw the sentence of the first: nobody waits for those who left.
static void fail_together(Communicator& processes, std::string problem) {
  const int64_t nobody = processes.size();
  int64_t lead = problem.empty() ? 0 : nobody - processes.rank();
  Tensor most = Tensor::from<int64_t>({lead}, {1}, Device::CPU, Category::Buffers);
  processes.all_reduce(most, ReduceOp::Max).wait();
  int64_t first = nobody - most.values<int64_t>()[0];
  if (first == nobody) return;
  problem.resize(999);
  problem.push_back(0);
  Tensor sentence = Tensor::from(std::vector<uint8_t>(problem.begin(), problem.end()), {1000},
                                 Device::CPU, Category::Buffers);
  processes.broadcast(sentence, int(first)).wait();
  fail(reinterpret_cast<const char*>(sentence.values<uint8_t>().data()));
}

std::unique_ptr<Communicator> start_gpu_ranks(Communicator& processes, int host, const char* hostid,
                                              std::shared_ptr<Ledger> ledger,
                                              Communicator::Options options) {
  fail_together(processes, take_a_gpu(processes, host, hostid));
  auto broadcast = [&](void* data, size_t bytes) {
    Tensor t = Tensor::empty({int64_t(bytes)}, DType::U8, Device::CPU, Category::Buffers);
    std::memcpy(t.raw(), data, bytes);
    processes.broadcast(t, 0).wait();
    std::memcpy(data, t.raw(), bytes);
  };
  return make_nccl_world(processes.rank(), processes.size(), broadcast, std::move(ledger), options);
}

}  // namespace lockstep
