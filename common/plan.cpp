#include "common/plan.h"

#include <omp.h>

#include <cstdio>
#include <set>

#include "common/evaluate.h"
#include "common/huggingface.h"

namespace lockstep {

Corpus open_corpus(Options& o) {
  CorpusOptions where;
  where.data = o.data;
  where.length = o.sequence;
  Corpus corpus(where);
  if (o.config.vocab == 0) o.config.vocab = corpus.vocab();
  o.config.validate();
  corpus.check_vocabulary(o.config.vocab);
  return corpus;
}

ModelMemory model_memory(int64_t n, DType compute, DType gradients) {
  DType master = sum_type(compute);
  int64_t each = int64_t(size_of(master));
  return {n * int64_t(size_of(compute)), n * int64_t(size_of(gradients)),
          master == compute ? 0 : n * each, 2 * n * each};
}

void print_plan(const Options& o, const Corpus& corpus) {
  const ModelConfig& c = o.config;
  int64_t n = c.parameters(), accumulation = o.accumulation();
  ModelMemory m = model_memory(n, o.compute, o.gradients);
  Feed feed(corpus, o);
  auto number = [](int64_t x) { return static_cast<long long>(x); };
  auto mebibytes = [](int64_t bytes) { return double(bytes) / (1 << 20); };
  std::printf(
      "model   %.2f M parameters: %lld layers, hidden %lld, %lld heads (%lld kv) of %lld, "
      "ffn %lld, vocabulary %lld\n",
      double(n) / 1e6, number(c.layers), number(c.hidden), number(c.heads), number(c.kv_heads),
      number(c.head_dim), number(c.ffn), number(c.vocab));
  std::printf("batch   %lld tokens a step = %lld micro-batch%s x %lld sequences x %lld tokens\n",
              number(o.batch_tokens), number(accumulation), accumulation == 1 ? "" : "es",
              number(o.micro_batch), number(o.sequence));
  std::printf("steps   %lld, learning rate %.1e after %lld warm-up steps, then a cosine to %.1e\n",
              number(feed.steps()), o.update.schedule.peak, number(o.update.schedule.warmup),
              o.update.schedule.peak * o.update.schedule.floor);
  std::printf("data    %s\n", corpus.description().c_str());
  std::printf(
      "memory  weights %.1f MiB, gradients %.1f, master weights %.1f, moments %.1f; "
      "activations come on top\n",
      mebibytes(m.weights), mebibytes(m.gradients), mebibytes(m.master), mebibytes(m.moments));
  std::string threads = text(omp_get_max_threads(), " threads");
  std::printf(
      "device  %s, %s\n",
      o.device == Device::CPU ? ("CPU, " + threads).c_str() : device::name(o.device).c_str(),
      o.compute == DType::BF16 ? "bf16 with fp32 master weights" : "fp32");
  if (!o.why_no_gpu.empty()) std::printf("        %s: using the CPU\n", o.why_no_gpu.c_str());
  std::fflush(stdout);
}

UpdateRule update_rule(const Options& o, int64_t steps) {
  UpdateRule rule = o.update;
  rule.schedule.total = steps;
  return rule;
}

void start_weights(const std::vector<Owned>& owned, const Options& o) {
  if (o.hugging_face.empty()) return initialise(owned, o.seed);
  WeightFiles files(o.hugging_face);
  std::vector<std::string> names;
  for (const Owned& part : owned) {
    assign(part, read_parameter(*part.parameter, files, o.config.tied));
    names.push_back(part.parameter->name);
  }
  refuse_unused(files, names, o.config.tied);
}

void show_sample(Stage& model, const Corpus& corpus, const Options& o) {
  if (o.sample == 0) return;
  std::vector<int32_t> prompt = {corpus.token(Split::Validation, 0)};
  std::vector<int32_t> written = sample(model, prompt, o.sample, o.temperature, o.sequence, o.seed);
  std::printf("sample:\n");
  if (corpus.vocab() == 256) {
    std::printf("%s\n", printable(written).c_str());
  } else {
    for (int32_t token : written) std::printf("%d ", token);
    std::printf("\n");
  }
}

}  // namespace lockstep
