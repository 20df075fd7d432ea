#include "common/ops.h"

#include <cmath>

namespace lockstep {

static Tensor values_of(const Weights& parameters) {
  std::vector<Tensor> tensors;
  for (Parameter* p : parameters) {
    require(p->value.defined(), p->name, " has no memory: allocate() the model first");
    tensors.push_back(p->value);
  }
  return Tensor::join(tensors);
}

static Tensor gradients_of(const Weights& parameters) {
  std::vector<Tensor> tensors;
  for (Parameter* p : parameters) {
    require(p->grad.defined(), p->name, " has no memory for its gradient");
    tensors.push_back(p->grad);
  }
  return Tensor::join(tensors);
}

void multiply(const Tensor& y, const Tensor& x, const Projection& p) {
  on(y).matmul(y, x, Op::N, values_of(p.weights), Op::T, 0);
  if (!p.biases.empty()) on(y).add_bias(y, values_of(p.biases));
}

void input_gradient(const Tensor& dx, const Tensor& dy, const Projection& p) {
  on(dx).matmul(dx, dy, Op::N, values_of(p.weights), Op::N, 0);
}

void add_weight_gradient(const Projection& p, const Tensor& dy, const Tensor& x) {
  on(x).matmul(gradients_of(p.weights), dy, Op::T, x, Op::N, 1);
  if (!p.biases.empty()) on(x).bias_backward(gradients_of(p.biases), dy);
}

Var linear(Tape& tape, const Var& in, const Projection& p) {
  Tensor x = in.value;
  Tensor y = x.like({x.dim(0), p.outputs()});
  multiply(y, x, p);

  auto input_adjoint = [p](const Gradients& d) -> Gradients {
    Tensor dx = d[0].like({d[0].dim(0), p.inputs()});
    input_gradient(dx, d[0], p);
    return {dx};
  };
  auto weight_adjoint = [p, x](const Gradients& d) { add_weight_gradient(p, d[0], x); };
  return tape.record("linear", {y}, {in}, input_adjoint, p.all(), weight_adjoint)[0];
}

Var add_bias(Tape& tape, const Var& in, const Weights& biases) {
  Tensor y = in.value.like();
  copy(y, in.value);
  on(y).add_bias(y, values_of(biases));
  auto input_adjoint = [](const Gradients& d) -> Gradients { return {d[0]}; };
  auto weight_adjoint = [biases](const Gradients& d) {
    on(d[0]).bias_backward(gradients_of(biases), d[0]);
  };
  return tape.record("add_bias", {y}, {in}, input_adjoint, biases, weight_adjoint)[0];
}

Var embedding(Tape& tape, Parameter& table, const Tensor& ids, int64_t first) {
  Tensor rows = values_of({&table});
  Tensor out = rows.like({ids.size(), rows.dim(1)});
  on(out).embedding(out, rows, ids, first);
  auto weight_adjoint = [&table, ids, first](const Gradients& d) {
    on(ids).embedding_backward(gradients_of({&table}), d[0], ids, first);
  };
  return tape.record("embedding", {out}, {}, {}, {&table}, weight_adjoint)[0];
}

// Both norms: without a delta there is one output, with it the sum comes first.
static std::vector<Var> record_norm(Tape& tape, const std::vector<Var>& inputs, Parameter& gain,
                                    double epsilon) {
  Tensor x = inputs[0].value, delta, sum = x;
  bool adds = inputs.size() == 2;
  if (adds) {
    delta = inputs[1].value;
    sum = x.like();
  }
  Tensor y = x.like();
  Tensor rstd = Tensor::empty({x.dim(0)}, sum_type(x.dtype()), x.device());
  on(x).rmsnorm(y, rstd, x, delta, adds ? sum : Tensor(), values_of({&gain}), float(epsilon));

  auto input_adjoint = [&gain, sum, rstd, adds](const Gradients& d) -> Gradients {
    Tensor through = adds ? d[0] : Tensor(), dy = d.back();
    if (!dy.defined()) return {through, through};  // only the sum was used
    Tensor dx = sum.like();
    on(dx).rmsnorm_backward(dx, dy, through, sum, rstd, values_of({&gain}));
    return adds ? Gradients{dx, dx} : Gradients{dx};
  };
  auto weight_adjoint = [&gain, sum, rstd](const Gradients& d) {
    if (d.back().defined())
      on(sum).rmsnorm_gain_backward(gradients_of({&gain}), d.back(), sum, rstd);
  };
  std::vector<Tensor> outputs = adds ? std::vector<Tensor>{sum, y} : std::vector<Tensor>{y};
  return tape.record("rmsnorm", outputs, inputs, input_adjoint, {&gain}, weight_adjoint);
}

Var rmsnorm(Tape& tape, const Var& x, Parameter& gain, double epsilon) {
  return record_norm(tape, {x}, gain, epsilon)[0];
}

Normed add_rmsnorm(Tape& tape, const Var& x, const Var& delta, Parameter& gain, double epsilon) {
  std::vector<Var> out = record_norm(tape, {x, delta}, gain, epsilon);
  return {out[0], out[1]};
}

Var add(Tape& tape, const Var& a, const Var& b) {
  Tensor sum = a.value.like();
  on(sum).add(sum, a.value, b.value);
  auto adjoint = [](const Gradients& d) -> Gradients { return {d[0], d[0]}; };
  return tape.record("add", {sum}, {a, b}, adjoint)[0];
}

Tensor rope_frequencies(int64_t head_dim, double theta, DType compute, Device device) {
  std::vector<double> frequencies;
  for (int64_t i = 0; i < head_dim / 2; ++i)
    frequencies.push_back(std::pow(theta, -2.0 * double(i) / double(head_dim)));
  Tensor exact = Tensor::from(frequencies, {head_dim / 2}, Device::CPU, Category::Buffers);
  if (sum_type(compute) == DType::F64) return exact;
  Tensor rounded = Tensor::empty({head_dim / 2}, DType::F32, Device::CPU, Category::Buffers);
  on(exact).cast(rounded, exact);
  return rounded.to(device, Category::Buffers);
}

Var rope(Tape& tape, const Var& qkv, const Tensor& positions, const Tensor& inv_freq,
         const AttentionShape& shape) {
  auto turn = [positions, inv_freq, shape](const Tensor& in, bool inverse) {
    Tensor out = in.like();
    on(in).rope(out, in, positions, inv_freq, shape, inverse);
    return out;
  };
  auto adjoint = [turn](const Gradients& d) -> Gradients { return {turn(d[0], true)}; };
  return tape.record("rope", {turn(qkv.value, false)}, {qkv}, adjoint)[0];
}

Var plain_attention(Tape& tape, const Var& in, const AttentionShape& shape) {
  Tensor qkv = in.value;
  Tensor out = qkv.like({qkv.dim(0), shape.heads * shape.head_dim});
  Tensor probs = qkv.like({shape.sequences, shape.heads, shape.length, shape.length});
  on(qkv).attention(out, probs, qkv, shape);
  auto adjoint = [qkv, probs, shape](const Gradients& d) -> Gradients {
    Tensor d_qkv = qkv.like();
    on(qkv).attention_backward(d_qkv, d[0], probs, qkv, shape);
    return {d_qkv};
  };
  return tape.record("attention", {out}, {in}, adjoint)[0];
}

Var swiglu(Tape& tape, const Var& in) {
  Tensor gate_up = in.value;
  Tensor out = gate_up.like({gate_up.dim(0), gate_up.dim(1) / 2});
  on(out).swiglu(out, gate_up);
  auto adjoint = [gate_up](const Gradients& d) -> Gradients {
    Tensor d_gate_up = gate_up.like();
    on(gate_up).swiglu_backward(d_gate_up, d[0], gate_up);
    return {d_gate_up};
  };
  return tape.record("swiglu", {out}, {in}, adjoint)[0];
}

// The mask is never stored: backward draws the same numbers again.
Var dropout(Tape& tape, const Var& x, const Tensor& rows, double p, RandomStream stream,
            int64_t width, int64_t first) {
  if (p == 0) return x;
  auto apply = [=](const Tensor& in) {
    Tensor out = in.like();
    on(in).dropout(out, in, rows, float(p), stream, width, first);
    return out;
  };
  auto adjoint = [apply](const Gradients& d) -> Gradients { return {apply(d[0])}; };
  return tape.record("dropout", {apply(x.value)}, {x}, adjoint)[0];
}

Var cross_entropy(Tape& tape, const Var& in, const Tensor& targets, const Tensor& scale) {
  Tensor logits = in.value;
  DType sums = sum_type(logits.dtype());
  Tensor loss = Tensor::empty({1}, sums, logits.device());
  Tensor lse = Tensor::empty({logits.dim(0)}, sums, logits.device());
  on(logits).cross_entropy(loss, lse, logits, targets, scale);
  auto adjoint = [logits, lse, targets, scale](const Gradients& d) -> Gradients {
    Tensor d_logits = logits.like();
    on(logits).cross_entropy_backward(d_logits, d[0], logits, lse, targets, scale, 0);
    return {d_logits};
  };
  return tape.record("cross_entropy", {loss}, {in}, adjoint)[0];
}

}  // namespace lockstep
