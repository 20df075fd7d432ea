#pragma once
// What a chapter may replace in the model. plain_parts() is the model of one rank; tensor
// parallelism, ring attention, experts, FlashAttention, recomputation … each exchange a few of
// these and leave the rest alone:
//
//     Parts parts = plain_parts();
//     use_tensor_parallel(parts, tp, /*sequence_parallel=*/true);      // 04
//     use_recomputation(parts, Recompute::Full);                       // 01
//     Stage model(config, parts, ...);

#include <deque>
#include <functional>
#include <memory>
#include <string>

#include "common/model_config.h"
#include "common/ops.h"

namespace lockstep {

Shard whole_shard(Shape whole);
Shard cut_shard(Shape whole, int dim, Range range);

// What recomputation, ZeRO-3 and the data-parallel buckets act on: the embedding, a block, the
// head.
struct Unit {
  enum Kind : uint8_t { Embedding, Block, Head } kind;
  std::string name;
  std::vector<Weights> groups;  // its parameters in the order of first use; a group lies together
  Weights borrowed;             // used here, owned by another unit: the tied table, in the head
  Weights uses() const {        // all of them
    Weights all = borrowed;
    for (const Weights& group : groups) all.insert(all.end(), group.begin(), group.end());
    return all;
  }
};

struct Parts;
// A piece of the model that declares parameters. They have names and shards, and no memory yet.
class Module {
 public:
  virtual ~Module() = default;
  Module() = default;
  Module(const Module&) = delete;  // adjoints and units keep pointers to its parameters
  const std::vector<Weights>& groups() const { return groups_; }

 protected:
  enum class Along { Columns, Rows };  // cut along the outputs (column-parallel) or the inputs
  struct Matrix {
    const char* name;
    int64_t out, in;      // of the whole model
    Range range;          // this rank's part of out (Columns) or of in (Rows)
    AxisSet copies = {};  // axes, beside the data's, over which ranks hold the same part
  };
  Parameter* gain(const Parts&, const std::string& name, int64_t size);
  Parameter* declare(std::string name, Shard, Init, AxisSet replicas, AxisSet sum_over);
  Projection projection(const Parts&, const std::string& prefix, Along,
                        const std::vector<Matrix>& matrices, bool bias, double std);

 private:
  std::deque<Parameter> parameters_;  // a deque keeps its elements where they are
  std::vector<Weights> groups_;
};

// From the normalised stream to what is added to it. 07 replaces it with experts.
class FeedForward : public Module {
 public:
  virtual Var forward(Tape&, const Var& x, const MicroBatch&) = 0;
};

using Body = std::function<Var(Tape&, const Var&)>;
using LinearFn = std::function<Var(Tape&, const Var& x, const Projection&)>;
using EmbeddingFn = std::function<Var(Tape&, Parameter& table, const Tensor& ids)>;
using AttentionFn = std::function<Var(Tape&, const Var& qkv, const AttentionShape&)>;
using LossFn = std::function<Var(Tape&, const Var& normed, Parameter& head, const MicroBatch&,
                                 const Tensor& scale)>;
using MakeFeedForward = std::function<std::unique_ptr<FeedForward>(const ModelConfig&, const Parts&,
                                                                   const std::string& prefix)>;
using AroundFn = std::function<Var(Tape&, const Var& x, Unit&, const Body&)>;

struct Parts {
  Cut tp;                         // how heads, ffn columns and vocabulary rows are cut
  AxisSet stream = {Axis::Data};  // axes over which the rows of the residual stream are spread
  Cut stream_rows;                // which of a micro-batch's rows the stream has here
  LinearFn column, row;           // into and out of the region that tp cuts
  EmbeddingFn embedding;
  AttentionFn attention;
  LossFn loss;
  MakeFeedForward feed_forward;
  AroundFn around;    // wraps every unit: recomputation, gather and release
  uint64_t seed = 1;  // of the dropout masks
};

Parts plain_parts();

}  // namespace lockstep
