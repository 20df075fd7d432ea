#pragma once
// How ranks talk. One interface, three backends: ranks as threads of one process (comm_threads), as
// processes over MPI (comm_mpi), as GPUs over NCCL (comm_nccl). Picture of the collectives, for
// three ranks holding a, b, c (a1 is the first third of a):
//
//   broadcast(0)    a  b  c  ▶  a    a    a        all_gather      a  b  c  ▶  abc  abc  abc
//   reduce(0)       a  b  c  ▶  Σ    b    c        reduce_scatter  a  b  c  ▶  Σ1   Σ2   Σ3
//   all_reduce      a  b  c  ▶  Σ    Σ    Σ        all_to_all      a  b  c  ▶  a1b1c1 a2b2c2 a3b3c3
//   gather(0)       a  b  c  ▶  abc  .    .        scatter(0)      a        ▶  a1   a2   a3
//
// Every call launches and returns a Work; wait() orders whatever is enqueued next behind the
// result. All ranks of a communicator call the same operations in the same order.

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "common/ledger.h"
#include "common/tensor.h"

namespace lockstep {

enum class ReduceOp : uint8_t { Sum, Max };

struct OperationTimes;  // operation_times.h

// One message of an exchange().
struct P2P {
  enum Kind : uint8_t { Send, Receive } kind;
  int peer;
  Tensor buffer;
};

// An operation under way. It owns the buffers: they live until it is done. It must be waited for;
// dropping it unfinished would let the program go on with half a result, so that ends the program
// (unless an exception is already on its way). Its communicator lives at least as long.
class Work {
 public:
  // What a backend knows about an operation under way.
  class State {
   public:
    virtual ~State() = default;
    virtual void wait() = 0;  // throws when the time limit is over
  };
  Work() = default;  // nothing to wait for
  explicit Work(std::unique_ptr<State> state) : state_(std::move(state)) {}
  Work(Work&&) = default;
  Work& operator=(Work&&);
  ~Work();
  void wait();
  bool pending() const { return state_ != nullptr; }

 private:
  std::unique_ptr<State> state_;
};

class Communicator {
 public:
  struct Options {
    double time_limit = 60;  // seconds that wait() gives the other ranks
    // Ranks first agree on operation and sizes (a launch then blocks). Not for exchange(): ranks
    // that have no message in it need not call it.
    bool check_calls = false;
    bool check_buffers = false;  // a buffer that changed between launch and wait() is found
    // GPUs that reach each other's memory move buffers of at least so many bytes by copy engines
    // (comm_copies.h), smaller ones by NCCL's kernels, which are launched faster.
    int64_t copy_from = 8 << 20;
  };
  virtual ~Communicator() = default;
  int rank() const { return rank_; }
  int size() const { return size_; }
  const std::string& name() const { return name_; }  // of the group: "world", "dp", …
  virtual const char* backend() const = 0;

  // In place. Sums add in rank order per element (but for NCCL's kernels); bf16 and fp16 are added
  // in fp32 and rounded once.
  Work all_reduce(Tensor buffer, ReduceOp op = ReduceOp::Sum);
  Work reduce(Tensor buffer, int root, ReduceOp op = ReduceOp::Sum);  // others' buffers stay
  Work broadcast(Tensor buffer, int root);
  // whole.size() = size() * shard.size(). In these four, shard may be the rank's own part of whole.
  // reduce_scatter then leaves the other parts undefined.
  Work all_gather(const Tensor& shard, Tensor whole);
  Work reduce_scatter(const Tensor& whole, Tensor shard, ReduceOp op = ReduceOp::Sum);
  Work gather(const Tensor& shard, Tensor whole, int root);   // whole: undefined but on the root
  Work scatter(const Tensor& whole, Tensor shard, int root);  // likewise
  // Rows of dim 0: send_rows[r] of them go to rank r, recv_rows[r] come from it. Rows may be uneven
  // or none.
  Work all_to_all(const Tensor& send, const std::vector<int64_t>& send_rows, Tensor recv,
                  const std::vector<int64_t>& recv_rows);
  // The only point-to-point call: a group of messages, posted together, so that two ranks that send
  // to each other do not wait for each other. Messages between two ranks match in posting order.
  // What a rank posts in one group its peers post without waiting in between.
  Work exchange(std::vector<P2P> messages);
  void barrier();
  // Collective. Opens what the group's first large collective would open; messages, which two ranks
  // post alone, cannot.
  virtual void connect() {}

  // Ranks that say the same color (0 or more) form a group, ordered by key (then by rank).
  // Collective.
  std::unique_ptr<Communicator> split(int color, int key, const std::string& name);

  // All ranks' texts, in rank order, on all ranks: how they tell each other in words. Blocks, and
  // is not written down: it is no part of a technique.
  std::vector<std::string> gather_texts(const std::string& mine);

  Ledger& ledger() { return *ledger_; }

 protected:
  Communicator(int rank, int size, std::string name, std::vector<int> world_ranks,
               std::shared_ptr<Ledger> ledger, Options options);

  using Pending = std::unique_ptr<Work::State>;
  virtual Pending do_all_reduce(const Tensor& buffer, ReduceOp) = 0;
  virtual Pending do_reduce(const Tensor& buffer, int root, ReduceOp) = 0;
  virtual Pending do_broadcast(const Tensor& buffer, int root) = 0;
  virtual Pending do_all_gather(const Tensor& shard, const Tensor& whole) = 0;
  virtual Pending do_reduce_scatter(const Tensor& whole, const Tensor& shard, ReduceOp) = 0;
  virtual Pending do_gather(const Tensor& shard, const Tensor& whole, int root) = 0;
  virtual Pending do_scatter(const Tensor& whole, const Tensor& shard, int root) = 0;
  virtual Pending do_all_to_all(const Tensor& send, const std::vector<int64_t>& send_rows,
                                const Tensor& recv, const std::vector<int64_t>& recv_rows) = 0;
  virtual Pending do_exchange(const std::vector<P2P>& messages) = 0;
  virtual void do_barrier() = 0;
  // One group of a split, as all its members know it.
  struct Members {
    int color = 0, mine = 0;       // this rank's number in the group
    std::vector<int> world_ranks;  // of all, in the group's order
  };
  virtual std::unique_ptr<Communicator> do_split(const Members&, const std::string& name) = 0;
  // All ranks' texts, in rank order: how ranks agree on a split, and check_calls on what they are
  // about to do. Blocks; `what` is for the error if a rank never comes.
  virtual std::vector<std::string> exchange_texts(std::string_view what,
                                                  const std::string& mine) = 0;

  // Of the operation that is just being launched, for backends whose messages move beside the rank.
  // Null where nobody measures.
  const std::shared_ptr<OperationTimes>& times() const { return times_; }

  const Options& options() const { return options_; }
  const std::vector<int>& world_ranks() const { return world_ranks_; }  // of this group's members
  std::shared_ptr<Ledger> shared_ledger() const { return ledger_; }

 private:
  struct Call;
  Work launch(const Call& call, const std::function<Pending()>& start);
  void agree(const std::string& mine);
  Members members_of(int color, int key);
  void agree_on_rows(const std::vector<int64_t>& send_rows, const std::vector<int64_t>& recv_rows);

  int rank_, size_;
  std::string name_;
  std::vector<int> world_ranks_;
  std::shared_ptr<Ledger> ledger_;
  Options options_;
  std::shared_ptr<OperationTimes> times_;
};

}  // namespace lockstep
