#pragma once
// What moved. Every operation of a rank is written down when it is launched: what, in which group,
// how many bytes, during which phase of which step. Programs compare the ledger with the textbook
// formula (`Volume`), and strict_order() asks whether all ranks would get through if none ran
// ahead.
//
// Two different byte counts, which texts often mix:
//   payload    the tensor that the operation is about: K bytes, whatever the number of ranks
//   wire       what one rank must send for it: an all-reduce of K bytes over N ranks sends
//              2 K (N-1)/N, a reduce-scatter or an all-gather of a whole of K bytes K (N-1)/N

#include <cstdint>
#include <string>
#include <vector>

namespace lockstep {

enum class Collective : uint8_t {
  AllReduce,
  Reduce,
  Broadcast,
  AllGather,
  ReduceScatter,
  Gather,
  Scatter,
  AllToAll,
  Exchange,
  Barrier
};
const char* name_of(Collective operation);

struct LedgerEntry {
  Collective operation;
  std::string group;                 // name of the communicator
  std::vector<int> members;          // its ranks in the world
  int64_t payload = 0, wire = 0;     // bytes
  int root = -1;                     // in the group, where there is one
  std::vector<int> sends, receives;  // of an exchange: world ranks, in posting order
  std::string phase;
  int64_t step = 0;
};

class OverlapMeter;

class Ledger {
 public:
  void write(LedgerEntry entry);  // adds phase and step
  void set_phase(std::string phase) { phase_ = std::move(phase); }
  void set_step(int64_t step) { step_ = step; }
  const std::vector<LedgerEntry>& entries() const { return entries_; }
  void clear() { entries_.clear(); }
  // Measures the operations of this rank while it is set (overlap_meter.h).
  void set_meter(OverlapMeter* meter) { meter_ = meter; }
  OverlapMeter* meter() const { return meter_; }

  // Sums over the entries that match; an empty group or phase matches all.
  struct Sum {
    int64_t calls = 0, payload = 0, wire = 0;
  };
  Sum sum(Collective operation, const std::string& group = "", const std::string& phase = "") const;
  Sum sum() const;

 private:
  std::vector<LedgerEntry> entries_;
  std::string phase_;
  int64_t step_ = 0;
  OverlapMeter* meter_ = nullptr;
};

// Bytes that one rank of n sends for an operation on a whole of `payload` bytes, when nothing is
// sent twice. gather and scatter: the busiest rank (the one that is not, or is, the root).
int64_t wire_bytes(Collective operation, int64_t payload, int n);

// Would all ranks finish if each ran its operations one at a time, in launch order, waiting for its
// partners (a rendezvous, as NCCL promises no more)? ledgers[r] are the entries of world rank r.
// Empty if so, else one sentence that names the operations on which they are stuck.
std::string strict_order(const std::vector<std::vector<LedgerEntry>>& ledgers);

}  // namespace lockstep
