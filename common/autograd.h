#pragma once
// Gradients by an explicit tape. Forward operations write down, in order, how to undo themselves;
// backward reads the list from its end:
//
//     forward     embed ── norm ── linear ── attention ── … ── loss
//     backward    embed ◀─ norm ◀─ linear ◀─ attention ◀─ … ◀─ 1
//
// Every entry has up to two adjoints, and that split is what zero-bubble pipelines live on:
//   B, the input adjoint:  gradients of the outputs -> gradients of the inputs (others wait for
//   it); W, the weight adjoint: gradients of the outputs -> added into Parameter::grad (nobody
//   waits).
//
// One tape per micro-batch in flight, used once. Rules that every operation keeps:
//   - weights are not Vars: adjoints capture Parameter*, never the tensors in it (ZeRO-3 moves
//   them);
//   - a forward has no side effects; an adjoint may return its argument but never writes into it;
//   - what backward needs is captured by the adjoint: it is freed when the entry has been replayed.

#include <functional>
#include <memory>
#include <unordered_map>
#include <vector>

#include "common/parameter.h"

namespace lockstep {

// A value on the way through the model, and where on the tape it came from.
struct Var {
  Tensor value;
  int entry = -1;  // -1: a constant, nobody wants its gradient
  int output = 0;
};

using Gradients = std::vector<Tensor>;  // one per output (or input); undefined where there is none
using InputAdjoint = std::function<Gradients(const Gradients& d_outputs)>;
using WeightAdjoint = std::function<void(const Gradients& d_outputs)>;

class Tape {
 public:
  enum class Mode { Record, Forget };    // Forget: evaluation; no entry is kept
  enum class Hooks { Fire, Silent };     // Silent: a nested tape, inside an entry of another
  enum class WeightWork { Now, Later };  // Later: weight_work() runs what backward left
  explicit Tape(Mode mode = Mode::Record, Hooks hooks = Hooks::Fire) : mode_(mode), hooks_(hooks) {}

  // Writes down an operation that has already computed `outputs`.
  std::vector<Var> record(const char* op, std::vector<Tensor> outputs, std::vector<Var> inputs,
                          InputAdjoint, std::vector<Parameter*> weights = {}, WeightAdjoint = {});
  // A leaf whose gradient is wanted: gradient(leaf) has it after backward.
  Var leaf(Tensor value);
  // An entry without data: runs when backward comes past this point.
  void mark(const char* what, std::function<void()> on_backward);

  // Replays everything in exactly the reverse order. d_out: the gradient of out.value.
  void backward(const Var& out, Tensor d_out, WeightWork when = WeightWork::Now);
  // For an input adjoint under way: what it has started and not waited for, `settle` waits for.
  // It runs behind the same entry's weight adjoint, whose matmul hides the wait; or at once, where
  // that comes Later or there is none.
  void settle_later(std::function<void()> settle) { settle_ = std::move(settle); }
  // The weight adjoints that Later left behind, in the order in which backward met them.
  void weight_work();
  Tensor gradient(const Var& leaf) const;
  Tensor take_gradient(const Var& leaf);  // the tape keeps it no longer

  bool records() const { return mode_ == Mode::Record; }
  // The parameters this tape uses, in the order of their first use.
  const std::vector<Parameter*>& weights() const { return weights_; }
  bool uses(Parameter* p) const { return uses_left_.contains(p); }
  size_t entries() const { return entries_.size(); }

 private:
  struct Entry {
    const char* op;
    std::vector<Var> inputs;  // without values
    size_t outputs = 0;
    InputAdjoint input_adjoint;
    std::vector<Parameter*> weights;
    WeightAdjoint weight_adjoint;
    std::function<void()> on_backward;
    Gradients d_outputs;
    bool reached() const;
  };
  void receive(const Var& target, const Tensor& gradient);
  void run_weight_adjoint(Entry& entry);

  Mode mode_;
  Hooks hooks_;
  bool replayed_ = false;
  std::vector<Entry> entries_;
  std::vector<Entry> later_;
  std::function<void()> settle_;
  std::vector<Parameter*> weights_;
  std::unordered_map<Parameter*, int> uses_left_;  // looked up only: never iterated
  std::unordered_map<Parameter*, bool> asked_;     // need_grad has been called
  std::unordered_map<int, Tensor> leaf_gradients_;
};

}  // namespace lockstep
