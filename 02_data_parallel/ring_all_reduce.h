#pragma once
// An all-reduce by hand: every rank starts with a buffer of its own and ends with the sum of all,
// and nobody ever sends more than one part of it at a time. The ranks form a ring; each talks to
// its two neighbours only. Four ranks, a buffer in four parts; a0 is rank 0's own numbers for part
// a, a01 the sum of rank 0's and rank 1's:
//
//   reduce-scatter: parts travel round the ring and collect what they pass
//            rank 0            rank 1            rank 2            rank 3
//   start    a0  b0  c0  d0    a1  b1  c1  d1    a2  b2  c2  d2    a3  b3  c3  d3
//   step 0   sends a ▶         sends b ▶         sends c ▶         sends d ▶ (to rank 0)
//            a0  b0  c0  d03   a01 b1  c1  d1    a2  b12 c2  d2    a3  b3  c23 d3
//   step 1   sends d ▶         sends a ▶         sends b ▶         sends c ▶
//            a0  b0  c023 d03  a01 b1  c1  d013  a012 b12 c2 d2    a3 b123 c23 d3
//   step 2   sends c ▶         sends d ▶         sends a ▶         sends b ▶
//            .   B   .   .     .   .   C   .     .   .   .   D     A   .   .   .
//   capitals: sums of all four; all-gather: they travel round the ring once more
//
// Both phases take N-1 steps of K/N elements: every rank sends 2 (N-1) K/N in all, about 2K however
// many ranks there are. That is the least an all-reduce can do, and why its time hardly grows with
// N (Patarasuk and Yuan, "Bandwidth optimal all-reduce algorithms", 2009; Baidu made it known,
// 2017). What does grow is the number of steps: 2 (N-1) latencies.
//
// The order in which a part is added depends on where it starts, so the bits of a ring's sum differ
// from those of a sum in rank order; all ranks still get the same ones.

#include <algorithm>

#include "common/comm.h"
#include "common/parts.h"
#include "common/reduce.h"

namespace lockstep {

class Ring {
 public:
  Ring(Communicator& comm, const Tensor& buffer)
      : comm_(comm),
        buffer_(buffer),
        n_(comm.size()),
        me_(comm.rank()),
        incoming_(Tensor::empty({2, std::min(kPiece, share(buffer.size(), {0, n_}).count)},
                                buffer.dtype(), buffer.device(), Category::Buffers)) {}

  // Afterwards part me + 1 is complete here. Large parts travel in pieces: while one is added, the
  // next is on its way, and the room for what arrives stays small enough for a cache.
  void reduce_scatter(ReduceOp op) {
    for (int step = 0; step < n_ - 1; ++step) {
      Tensor leaves = part(me_ - step), mine = part(me_ - step - 1);
      int64_t most = share(buffer_.size(), {0, n_}).count;
      int64_t pieces = std::max<int64_t>(1, (most + kPiece - 1) / kPiece);
      Work under_way = start(leaves, mine, 0);
      for (int64_t i = 0; i < pieces; ++i) {
        Work next = i + 1 < pieces ? start(leaves, mine, i + 1) : Work();
        under_way.wait();
        under_way = std::move(next);
        Tensor sum = piece(mine, i);
        reduce_in_rank_order(sum, {sum, room(i, sum.size())}, op);
      }
    }
  }

  void all_gather() {
    for (int step = 0; step < n_ - 1; ++step)
      pass_on(part(me_ + 1 - step), part(me_ - step)).wait();
  }

 private:
  static constexpr int64_t kPiece = 1 << 20;  // elements
  static Tensor piece(const Tensor& part, int64_t i) {
    int64_t first = std::min(i * kPiece, part.size());
    return part.flat(first, std::min(kPiece, part.size() - first));
  }
  Tensor room(int64_t i, int64_t size) const { return incoming_.rows(i % 2, 1).flat(0, size); }
  Work start(const Tensor& leaves, const Tensor& mine, int64_t i) {
    return pass_on(piece(leaves, i), room(i, piece(mine, i).size()));
  }
  // Part i of the buffer; i may be any integer, the ring closes.
  Tensor part(int i) const {
    Range range = share(buffer_.size(), {(i % n_ + n_) % n_, n_});
    return buffer_.flat(range.first, range.count);
  }
  // Sends to the next rank and receives from the previous one at the same time.
  Work pass_on(const Tensor& leaves, const Tensor& arrives) {
    int next = (me_ + 1) % n_, previous = (me_ + n_ - 1) % n_;
    return comm_.exchange({{P2P::Send, next, leaves}, {P2P::Receive, previous, arrives}});
  }

  Communicator& comm_;
  Tensor buffer_;
  int n_, me_;
  Tensor incoming_;
};

inline void ring_all_reduce(Communicator& comm, const Tensor& buffer, ReduceOp op = ReduceOp::Sum) {
  if (comm.size() == 1) return;
  Ring ring(comm, buffer);
  ring.reduce_scatter(op);
  ring.all_gather();
}

}  // namespace lockstep
