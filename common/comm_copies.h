#pragma once
// Collectives of GPUs that reach each other's memory, by copy engines.
//
// NCCL moves data with kernels of its own, and beside matmuls that is dear: a matmul whose blocks
// fill all multiprocessors once needs a second round as soon as some of them are taken. A GPU also
// has copy engines, which do nothing but move, and over NVLink they reach other GPUs:
//
//   multiprocessors   matmul │ matmul │ matmul │ matmul ...      all of them, all the time
//   copy engine       ── piece ──▶ ── piece ──▶ ── piece ──▶
//
// Each rank has an inbox for every other rank, and that one writes into it, piece by piece:
//
//   rank 0   sent + 1 ──────────▶ rank 1   inbox from 0:  │ slot 0 │ slot 1 │ slot 2 │ slot 3 │
//                                                               └─▶ added to the sum, or copied
//            ◀────────── taken + 1                                  to where it belongs
//
// A sender may be as many pieces ahead as there are slots. Streams wait for the two counters by
// themselves, neither the host nor a kernel does. The sum is the only kernel, and it adds in the
// order of ranks, 16-bit types in fp32: what comes out has the same bits as over MPI.
//
// NCCL 2.28 has begun to move like this too where nothing is added (its release notes, "copy engine
// collectives").

#include <cuda_runtime.h>

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "common/comm.h"
#include "common/comm_nccl_watch.h"

namespace lockstep {

class CopyEngines {
 public:
  // Collective. Null on all ranks if one of them cannot reach another's memory: on another machine,
  // say. tell_all: all ranks' texts, in rank order.
  using TellAll = std::function<std::vector<std::string>(const std::string& mine)>;
  static std::unique_ptr<CopyEngines> open(int rank, int size, const TellAll& tell_all);
  // Collective, when the streams are done: nobody may free an inbox that another still sees. Not
  // done by itself, since a program that fails must not wait for the others.
  void close(const TellAll& tell_all);

  // As in Communicator; enqueued in `stream`, in which the result is there when the call's work is.
  void all_reduce(const Tensor& buffer, ReduceOp op, cudaStream_t stream);
  void all_gather(const Tensor& shard, const Tensor& whole, cudaStream_t stream);
  void reduce_scatter(const Tensor& whole, const Tensor& shard, ReduceOp op, cudaStream_t stream);
  void exchange(const std::vector<P2P>& messages, cudaStream_t stream);

 private:
  static constexpr int kSlots = 4, kMostRanks = 64;
  static constexpr int64_t kInboxes = 256 << 20;  // bytes, of all inboxes of a rank

  // What the other ranks write in this rank's memory; behind it are the inboxes.
  struct Counters {
    uint32_t sent[kMostRanks], taken[kMostRanks];  // by the rank of that number
  };
  // Another rank, as seen from here. In its own entry: this rank's memory.
  struct Peer {
    Counters* memory = nullptr;
    uint32_t sent = 0, taken = 0;  // pieces to it, from it
  };
  using PartOf = std::function<Tensor(int rank)>;

  CopyEngines(int rank, int size) : rank_(rank), peers_(size_t(size)) {}
  std::string allocate();
  bool map(const std::vector<std::string>& handles);
  std::byte* slot(Counters* memory, int from, uint32_t number) const;
  int64_t count(const Tensor& t) const;  // of its pieces
  Tensor piece(const Tensor& t, int64_t number) const;
  int size() const { return int(peers_.size()); }
  int64_t slot_bytes() const { return kInboxes / kSlots / size() / 256 * 256; }
  int after(int step) const { return (rank_ + step) % size(); }

  void order(cudaStream_t earlier, cudaStream_t later);
  void begin(cudaStream_t stream);
  void finish();
  void add_parts(const PartOf& part_of, const Tensor& to, ReduceOp op);
  void tell_parts(const Tensor& mine, const PartOf& part_of);
  void send(int to, const Tensor& piece);
  const std::byte* receive(int from);  // a piece, which stays until taken()
  void taken(int from);

  int rank_;
  std::vector<Peer> peers_;
  cudaStream_t sending_ = nullptr;    // so that sending never waits for what is received
  cudaStream_t receiving_ = nullptr;  // of the call under way
  Moment turn_;
};

}  // namespace lockstep
