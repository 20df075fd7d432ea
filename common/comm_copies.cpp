#include "common/comm_copies.h"

#include <cuda.h>

#include <algorithm>
#include <fstream>
#include <map>
#include <sstream>

#include "common/device_cuda.h"
#include "common/driver_function.h"
#include "common/reduce.h"

namespace lockstep {

// ---- What the driver has and the runtime has not ----

// What is enqueued next comes after the counter has become `least` or more (as a difference, so
// that it may wrap).
static void wait_until(cudaStream_t stream, const uint32_t* counter, uint32_t least) {
  static auto wait = driver_function<decltype(&cuStreamWaitValue32)>("cuStreamWaitValue32");
  CUresult status = wait(stream, CUdeviceptr(counter), least, CU_STREAM_WAIT_VALUE_GEQ);
  require(status == CUDA_SUCCESS, "cuStreamWaitValue32 failed: ", int(status));
}

// Seen by everyone only when all that the stream did before is seen, too.
static void write(cudaStream_t stream, uint32_t* counter, uint32_t value) {
  static auto write = driver_function<decltype(&cuStreamWriteValue32)>("cuStreamWriteValue32");
  CUresult status = write(stream, CUdeviceptr(counter), value, CU_STREAM_WRITE_VALUE_DEFAULT);
  require(status == CUDA_SUCCESS, "cuStreamWriteValue32 failed: ", int(status));
}

static void copy(void* to, const void* from, int64_t bytes, cudaStream_t stream) {
  if (to != from && bytes > 0)
    check(cudaMemcpyAsync(to, from, size_t(bytes), cudaMemcpyDeviceToDevice, stream));
}

// ---- Beginning and end ----

static std::string machine() {
  std::string boot;
  std::getline(std::ifstream("/proc/sys/kernel/random/boot_id"), boot);
  return boot;
}

std::unique_ptr<CopyEngines> CopyEngines::open(int rank, int size, const TellAll& tell_all) {
  if (size > kMostRanks) return nullptr;
  std::unique_ptr<CopyEngines> engines(new CopyEngines(rank, size));
  bool all = engines->map(tell_all(engines->allocate()));
  for (const std::string& reached : tell_all(all ? "all" : "not all"))
    all = all && reached == "all";
  if (all) return engines;
  engines->close(tell_all);
  return nullptr;
}

// Returns how the others find this rank's memory: the machine, and CUDA's handle in words.
std::string CopyEngines::allocate() {
  void* memory = nullptr;
  check(cudaMalloc(&memory, sizeof(Counters) + kInboxes));
  check(cudaMemset(memory, 0, sizeof(Counters)));
  check(cudaDeviceSynchronize());
  peers_[size_t(rank_)].memory = static_cast<Counters*>(memory);
  sending_ = stream_of_messages();
  cudaIpcMemHandle_t handle;
  if (cudaIpcGetMemHandle(&handle, memory) != cudaSuccess) {
    cudaGetLastError();  // a platform that cannot: nobody will reach it
    return "nowhere";
  }
  std::ostringstream words;
  words << machine();
  for (char byte : handle.reserved) words << ' ' << int(byte);
  return words.str();
}

bool CopyEngines::map(const std::vector<std::string>& handles) {
  for (int r = 0; r < size(); ++r) {
    if (r == rank_) continue;
    std::istringstream words(handles[size_t(r)]);
    std::string boot;
    words >> boot;
    if (boot != machine()) return false;
    cudaIpcMemHandle_t handle;
    for (char& byte : handle.reserved) {
      int value = 0;
      words >> value;
      byte = char(value);
    }
    void* memory = nullptr;
    if (cudaIpcOpenMemHandle(&memory, handle, cudaIpcMemLazyEnablePeerAccess) != cudaSuccess) {
      cudaGetLastError();  // no way to this GPU: nothing to remember
      return false;
    }
    peers_[size_t(r)].memory = static_cast<Counters*>(memory);
  }
  return true;
}

void CopyEngines::close(const TellAll& tell_all) {
  for (int r = 0; r < size(); ++r)
    if (Counters* memory = r == rank_ ? nullptr : peers_[size_t(r)].memory)
      check(cudaIpcCloseMemHandle(memory));
  tell_all("closed");
  check(cudaFree(peers_[size_t(rank_)].memory));
  check(cudaStreamDestroy(sending_));
}

// ---- Pieces ----

std::byte* CopyEngines::slot(Counters* memory, int from, uint32_t number) const {
  return reinterpret_cast<std::byte*>(memory + 1) +
         (from * kSlots + number % kSlots) * slot_bytes();
}

int64_t CopyEngines::count(const Tensor& t) const {
  return (t.bytes() + slot_bytes() - 1) / slot_bytes();
}

// Empty, where the tensor ends before it.
Tensor CopyEngines::piece(const Tensor& t, int64_t number) const {
  int64_t each = slot_bytes() / int64_t(size_of(t.dtype()));
  int64_t first = std::min(number * each, t.size());
  return t.flat(first, std::min(each, t.size() - first));
}

void CopyEngines::send(int to, const Tensor& piece) {
  if (piece.size() == 0) return;
  Peer& peer = peers_[size_t(to)];
  const Counters& mine = *peers_[size_t(rank_)].memory;
  wait_until(sending_, &mine.taken[to], peer.sent + 1 - kSlots);
  copy(slot(peer.memory, rank_, peer.sent), piece.raw(), piece.bytes(), sending_);
  write(sending_, &peer.memory->sent[rank_], ++peer.sent);
}

const std::byte* CopyEngines::receive(int from) {
  const Peer& peer = peers_[size_t(from)];
  Counters* mine = peers_[size_t(rank_)].memory;
  wait_until(receiving_, &mine->sent[from], peer.taken + 1);
  return slot(mine, from, peer.taken);
}

void CopyEngines::taken(int from) {
  Peer& peer = peers_[size_t(from)];
  write(receiving_, &peer.memory->taken[rank_], ++peer.taken);
}

// ---- Collectives ----

// `later` goes on when `earlier` has come to this point.
void CopyEngines::order(cudaStream_t earlier, cudaStream_t later) {
  turn_.record(earlier);
  turn_.block(later);
}

// What is sent has been made by the rank's stream. What `stream` still receives for earlier calls
// need not have come.
void CopyEngines::begin(cudaStream_t stream) {
  receiving_ = stream;
  order(device::stream(), sending_);
}

void CopyEngines::finish() { order(sending_, receiving_); }

// Each rank's part goes to that rank, where all of them are added. No part is larger than the
// first.
void CopyEngines::add_parts(const PartOf& part_of, const Tensor& to, ReduceOp op) {
  device::OnStream on(receiving_);  // the kernels of the sum
  for (int64_t p = 0; p < count(part_of(0)); ++p) {
    for (int step = 1; step < size(); ++step) send(after(step), piece(part_of(after(step)), p));
    Tensor mine = piece(part_of(rank_), p);
    if (mine.size() == 0) continue;
    std::vector<const std::byte*> all;
    for (int r = 0; r < size(); ++r) all.push_back(r == rank_ ? mine.raw() : receive(r));
    cuda::reduce_in_rank_order(piece(to, p), all, op);
    for (int step = 1; step < size(); ++step) taken(after(step));
  }
}

// This rank's part goes to all others, and theirs come.
void CopyEngines::tell_parts(const Tensor& mine, const PartOf& part_of) {
  for (int64_t p = 0; p < count(part_of(0)); ++p) {
    for (int step = 1; step < size(); ++step) send(after(step), piece(mine, p));
    for (int step = 1; step < size(); ++step) {
      int from = after(size() - step);
      Tensor to = piece(part_of(from), p);
      if (to.size() == 0) continue;
      copy(to.raw(), receive(from), to.bytes(), receiving_);
      taken(from);
    }
  }
}

void CopyEngines::all_reduce(const Tensor& buffer, ReduceOp op, cudaStream_t stream) {
  constexpr int64_t kAligned = 16;  // elements: a part that begins at 16 bytes is added faster
  int64_t each = (buffer.size() + size() - 1) / size();
  each = (each + kAligned - 1) / kAligned * kAligned;
  auto part_of = [&](int rank) {
    int64_t first = std::min(rank * each, buffer.size());
    return buffer.flat(first, std::min(each, buffer.size() - first));
  };
  begin(stream);
  add_parts(part_of, part_of(rank_), op);
  order(receiving_, sending_);  // what is sent on are the sums
  tell_parts(part_of(rank_), part_of);
  finish();
}

void CopyEngines::reduce_scatter(const Tensor& whole, const Tensor& shard, ReduceOp op,
                                 cudaStream_t stream) {
  begin(stream);
  add_parts([&](int rank) { return whole.flat(rank * shard.size(), shard.size()); }, shard, op);
  finish();
}

void CopyEngines::all_gather(const Tensor& shard, const Tensor& whole, cudaStream_t stream) {
  auto part_of = [&](int rank) { return whole.flat(rank * shard.size(), shard.size()); };
  begin(stream);
  tell_parts(shard, part_of);
  copy(part_of(rank_).raw(), shard.raw(), shard.bytes(), stream);
  finish();
}

// One piece of each way between two ranks in turn, all that is sent before what is received: a long
// message must not wait for the end of another, which may wait for this one on the other side.
void CopyEngines::exchange(const std::vector<P2P>& messages, cudaStream_t stream) {
  using Way = std::pair<P2P::Kind, int>;  // to the rank so many numbers up, from the one down
  std::map<Way, std::vector<Tensor>> ways;
  size_t most = 0;
  for (const P2P& m : messages) {
    int step = m.kind == P2P::Send ? m.peer - rank_ : rank_ - m.peer;
    std::vector<Tensor>& way = ways[{m.kind, (step + size()) % size()}];
    for (int64_t p = 0; p < count(m.buffer); ++p) way.push_back(piece(m.buffer, p));
    most = std::max(most, way.size());
  }
  begin(stream);
  for (size_t p = 0; p < most; ++p)
    for (const auto& [way, pieces] : ways) {
      if (p >= pieces.size()) continue;
      if (way.first == P2P::Send) {
        send(after(way.second), pieces[p]);
      } else {
        int from = after(size() - way.second);
        copy(pieces[p].raw(), receive(from), pieces[p].bytes(), receiving_);
        taken(from);
      }
    }
  finish();
}

}  // namespace lockstep
