#pragma once
// One check for every differentiable operation: its adjoints against central differences in double.
// The function under test turns leaves (and parameters) into outputs; the scalar that is
// differentiated is the sum of all outputs, each element weighted by its own random number.

#include <gtest/gtest.h>

#include <cmath>
#include <functional>

#include "common/autograd.h"

namespace lockstep {

inline Tensor random_tensor(Shape shape, const std::string& name, DType dtype = DType::F64,
                            Device device = Device::CPU, double std = 1) {
  Tensor t = Tensor::empty(std::move(shape), dtype, device);
  on(t).fill_normal(t, float(std), RandomStream(7, name), {}, 0);
  return t;
}

// A parameter with memory of its own, for tests of single operations.
inline Parameter parameter(const std::string& name, Shape shape, double std = 1,
                           DType dtype = DType::F64) {
  Parameter p;
  p.name = name;
  p.shard = {shape, shape, -1, 0};
  p.value = random_tensor(shape, name, dtype, Device::CPU, std);
  p.grad = Tensor::zeros(shape, dtype, Device::CPU);
  return p;
}

using Function = std::function<std::vector<Var>(Tape&, const std::vector<Var>&)>;

inline std::vector<Tensor> output_weights(const std::vector<Var>& outputs) {
  std::vector<Tensor> weights;
  for (size_t k = 0; k < outputs.size(); ++k)
    weights.push_back(
        random_tensor(outputs[k].value.shape(), "weights of output " + std::to_string(k)));
  return weights;
}

inline double weighted_sum(const Function& f, const std::vector<Tensor>& inputs) {
  Tape tape(Tape::Mode::Forget);
  std::vector<Var> leaves;
  for (const Tensor& t : inputs) leaves.push_back({t});
  std::vector<Var> outputs = f(tape, leaves);
  std::vector<Tensor> weights = output_weights(outputs);
  double sum = 0;
  for (size_t k = 0; k < outputs.size(); ++k)
    for (int64_t i = 0; i < weights[k].size(); ++i)
      sum += weights[k].data<double>()[i] * outputs[k].value.data<double>()[i];
  return sum;
}

// Compares `gradient` with differences of the weighted sum as each element of `t` moves.
inline void expect_matches_differences(const std::string& name, const Tensor& t,
                                       const Tensor& gradient, const std::function<double()>& value,
                                       double tolerance = 1e-7) {
  constexpr double kStep = 1e-6;
  double error = 0, norm = 0;
  for (int64_t i = 0; i < t.size(); ++i) {
    double& x = t.data<double>()[i];
    double before = x;
    x = before + kStep;
    double above = value();
    x = before - kStep;
    double below = value();
    x = before;
    double numeric = (above - below) / (2 * kStep), analytic = gradient.data<double>()[i];
    error += (numeric - analytic) * (numeric - analytic);
    norm += numeric * numeric;
  }
  EXPECT_GT(norm, 0) << name << ": the differences are all zero, so they prove nothing";
  EXPECT_LE(std::sqrt(error / norm), tolerance) << name;
}

inline void expect_gradients(const Function& f, const std::vector<Tensor>& inputs,
                             const std::vector<Parameter*>& parameters = {}) {
  Tape tape;
  std::vector<Var> leaves;
  for (const Tensor& t : inputs) leaves.push_back(tape.leaf(t));
  std::vector<Var> outputs = f(tape, leaves);
  std::vector<Tensor> weights = output_weights(outputs);
  auto adjoint = [weights](const Gradients&) -> Gradients { return weights; };
  Tensor one = Tensor::from<double>({1}, {1});
  Var sum = tape.record("weighted sum", {one}, outputs, adjoint)[0];
  for (Parameter* p : parameters) zero(p->grad);
  tape.backward(sum, one);

  auto value = [&] { return weighted_sum(f, inputs); };
  for (size_t k = 0; k < inputs.size(); ++k)
    expect_matches_differences("input " + std::to_string(k), inputs[k], tape.gradient(leaves[k]),
                               value);
  for (Parameter* p : parameters) expect_matches_differences(p->name, p->value, p->grad, value);
}

}  // namespace lockstep
