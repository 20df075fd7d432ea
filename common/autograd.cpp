#include "common/autograd.h"

#include <utility>

namespace lockstep {

bool Tape::Entry::reached() const {
  for (const Tensor& d : d_outputs)
    if (d.defined()) return true;
  return false;
}

std::vector<Var> Tape::record(const char* op, std::vector<Tensor> outputs, std::vector<Var> inputs,
                              InputAdjoint input_adjoint, std::vector<Parameter*> weights,
                              WeightAdjoint weight_adjoint) {
  for (Parameter* p : weights)
    if (uses_left_[p]++ == 0) weights_.push_back(p);
  int index = records() ? int(entries_.size()) : -1;
  std::vector<Var> vars;
  for (size_t i = 0; i < outputs.size(); ++i)
    vars.push_back({std::move(outputs[i]), index, int(i)});
  if (!records()) return vars;

  require(!replayed_, op, " was recorded on a tape that has already been replayed");
  Entry entry{.op = op,
              .inputs = std::move(inputs),
              .outputs = vars.size(),
              .input_adjoint = std::move(input_adjoint),
              .weights = std::move(weights),
              .weight_adjoint = std::move(weight_adjoint),
              .on_backward = {},
              .d_outputs = Gradients(vars.size())};
  for (Var& v : entry.inputs) v.value = {};  // the adjoints keep what they need, and only that
  entries_.push_back(std::move(entry));
  return vars;
}

Var Tape::leaf(Tensor value) { return record("leaf", {std::move(value)}, {}, {})[0]; }

void Tape::mark(const char* what, std::function<void()> on_backward) {
  if (!records()) return;
  record(what, {}, {}, {});
  entries_.back().on_backward = std::move(on_backward);
}

// Gradients of a value that several operations read are summed, never in place: an adjoint may have
// returned its own argument, which somebody else still needs.
void Tape::receive(const Var& target, const Tensor& gradient) {
  if (target.entry < 0 || !gradient.defined()) return;
  Tensor& slot = entries_[size_t(target.entry)].d_outputs[size_t(target.output)];
  if (!slot.defined()) {
    slot = gradient;
    return;
  }
  Tensor sum = slot.like();
  on(sum).add(sum, slot, gradient);
  slot = sum;
}

void Tape::backward(const Var& out, Tensor d_out, WeightWork when) {
  require(records(), "a tape that forgets cannot run backward");
  require(out.entry >= 0, "backward needs a value that this tape has recorded, not a constant");
  require(!replayed_, "a tape is replayed once, this one has been");
  replayed_ = true;
  receive(out, d_out);
  d_out = {};
  for (size_t i = entries_.size(); i-- > 0;) {
    Entry entry = std::move(entries_[i]);  // its memory goes when this round ends
    if (entry.on_backward) entry.on_backward();
    if (entry.input_adjoint && entry.reached()) {
      Gradients d_inputs = entry.input_adjoint(entry.d_outputs);
      require(d_inputs.size() == entry.inputs.size(), entry.op, " has ", entry.inputs.size(),
              " inputs, its adjoint returned ", d_inputs.size(), " gradients");
      entry.input_adjoint = {};
      for (size_t k = 0; k < d_inputs.size(); ++k) receive(entry.inputs[k], d_inputs[k]);
    } else if (entry.inputs.empty() && entry.weights.empty() && entry.reached()) {
      leaf_gradients_[int(i)] = entry.d_outputs[0];
    }
    auto settle = [this] {
      if (auto waits = std::exchange(settle_, {})) waits();
    };
    if (entry.weights.empty() || when == WeightWork::Later) settle();
    if (entry.weights.empty()) continue;
    if (when == WeightWork::Now) {
      run_weight_adjoint(entry);
      settle();
    } else {
      entry.input_adjoint = {};
      later_.push_back(std::move(entry));
    }
  }
}

void Tape::weight_work() {
  for (Entry& waiting : later_) {
    Entry entry = std::move(waiting);
    run_weight_adjoint(entry);
  }
  later_.clear();
}

// Entries that no gradient reached still count their weights down, so that hooks fire on every rank
// alike.
void Tape::run_weight_adjoint(Entry& entry) {
  if (hooks_ == Hooks::Fire) {
    for (Parameter* p : entry.weights)
      if (!std::exchange(asked_[p], true) && p->need_grad) p->need_grad(*p);
  }
  if (entry.reached()) entry.weight_adjoint(entry.d_outputs);
  for (Parameter* p : entry.weights) {
    bool last = --uses_left_[p] == 0;
    if (last && hooks_ == Hooks::Fire && p->on_grad_ready) p->on_grad_ready(*p);
  }
}

Tensor Tape::gradient(const Var& leaf) const {
  auto found = leaf_gradients_.find(leaf.entry);
  return found == leaf_gradients_.end() ? Tensor() : found->second;
}

Tensor Tape::take_gradient(const Var& leaf) {
  auto found = leaf_gradients_.extract(leaf.entry);
  return found ? std::move(found.mapped()) : Tensor();
}

}  // namespace lockstep
