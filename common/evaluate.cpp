#include "common/evaluate.h"

#include <algorithm>
#include <cmath>
#include <numeric>

namespace lockstep {

static Tensor scalar(double value, DType dtype, Device device) {
  Tensor t = Tensor::empty({1}, dtype, device, Category::Buffers);
  on(t).fill(t, value);
  return t;
}

// One number of any floating type; waits for the device.
static double number(const Tensor& t) {
  return t.dtype() == DType::F64 ? t.values<double>()[0] : double(t.values<float>()[0]);
}

void MeanLoss::add(const Tensor& loss) { sum_ += number(loss); }

void MeanLoss::count(const MicroBatch& batch) {
  for (int32_t target : batch.targets.values<int32_t>()) valid_ += target >= 0;
}

double MeanLoss::over(Communicator* ranks, Device device) const {
  std::vector<double> all = {sum_, valid_};
  if (ranks) {
    Tensor both = Tensor::from<double>(all, {2}, device, Category::Buffers);
    ranks->all_reduce(both).wait();
    all = both.values<double>();
  }
  require(all[1] > 0, "there is no token to evaluate on");
  return all[0] / all[1];
}

double evaluate(Stage& model, const std::vector<MicroBatch>& batches, Communicator* data) {
  Tensor one = scalar(1, sum_type(model.compute()), model.device());
  MeanLoss mean;
  for (const MicroBatch& batch : batches) {
    Tape tape(Tape::Mode::Forget);
    mean.add(model.loss(tape, model.forward(tape, batch), batch, one).value);
    mean.count(batch);
  }
  return mean.over(data, model.device());
}

int32_t pick(const std::vector<float>& logits, double temperature, double u) {
  auto likeliest = std::max_element(logits.begin(), logits.end());
  if (temperature == 0) return int32_t(likeliest - logits.begin());
  std::vector<double> weights;
  for (float l : logits) weights.push_back(std::exp((double(l) - *likeliest) / temperature));
  double left = u * std::accumulate(weights.begin(), weights.end(), 0.0);
  for (size_t i = 0; i < weights.size(); ++i)
    if ((left -= weights[i]) < 0) return int32_t(i);
  return int32_t(likeliest - logits.begin());  // rounding used up the last of u
}

MicroBatch sequence(const std::vector<int32_t>& tokens, Device device, int64_t first) {
  int64_t n = int64_t(tokens.size());
  std::vector<int32_t> positions(tokens.size());
  std::iota(positions.begin(), positions.end(), int32_t(first));
  std::vector<int64_t> rows(positions.begin(), positions.end());
  MicroBatch batch;
  batch.inputs = Tensor::from(tokens, {n}, device, Category::Buffers);
  batch.targets =
      Tensor::from(std::vector<int32_t>(tokens.size(), -1), {n}, device, Category::Buffers);
  batch.positions = Tensor::from(positions, {n}, device, Category::Buffers);
  batch.rows = Tensor::from(rows, {n}, device, Category::Buffers);
  batch.sequences = 1;
  batch.length = n;
  batch.training = false;
  return batch;
}

// A rank's columns of a row of logits, among all ranks' columns.
static Tensor whole_row(const Tensor& mine, const Stage& model, Communicator& tp) {
  Range columns = share(model.config().vocab, {tp.rank(), tp.size()});
  Tensor row = Tensor::zeros({model.config().vocab}, mine.dtype(), mine.device());
  copy(row.flat(columns.first, columns.count), mine);
  tp.all_reduce(row).wait();
  return row;
}

std::vector<float> next_logits(Stage& model, std::vector<int32_t> tokens, int64_t first,
                               Communicator* tp) {
  require(!tokens.empty(), "a text that goes on needs at least one token to start from");
  int64_t last = int64_t(tokens.size()) - 1;
  // Ranks may have to have equally many rows. What comes behind a token does not change it.
  while (tp && int64_t(tokens.size()) % tp->size() != 0) tokens.push_back(0);
  Tape tape(Tape::Mode::Forget);
  Var hidden = model.forward(tape, sequence(tokens, model.device(), first));
  if (!tp) hidden.value = hidden.value.rows(last, 1);
  Tensor logits = model.logits(tape, hidden).value;
  if (tp) logits = whole_row(logits.rows(last, 1).flat(0, logits.dim(1)), model, *tp);
  Tensor exact = Tensor::empty(logits.shape(), DType::F32, logits.device());
  on(logits).cast(exact, logits);
  return exact.values<float>();
}

std::vector<int32_t> sample(Stage& model, std::vector<int32_t> prompt, int64_t count,
                            double temperature, int64_t window, uint64_t seed, Communicator* tp) {
  RandomStream draw(seed, "sample");
  std::vector<int32_t> text = std::move(prompt);
  size_t begin = text.size();
  for (int64_t i = 0; i < count; ++i) {
    size_t first = text.size() > size_t(window) ? text.size() - size_t(window) : 0;
    std::vector<int32_t> seen(text.begin() + int64_t(first), text.end());
    text.push_back(pick(next_logits(model, seen, 0, tp), temperature, draw.uniform(uint64_t(i))));
  }
  return std::vector<int32_t>(text.begin() + int64_t(begin), text.end());
}

std::string printable(const std::vector<int32_t>& bytes) {
  std::string out;
  for (int32_t b : bytes) out += b == '\n' || b == '\t' || (b >= 32 && b < 127) ? char(b) : '?';
  return out;
}

}  // namespace lockstep
