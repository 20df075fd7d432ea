#include "common/plan.h"

#include <omp.h>

#include <algorithm>
#include <cstdio>

#include "common/evaluate.h"
#include "common/huggingface.h"
#include "common/memory_model.h"

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

void settle_ranks(Options& o, ProcessMesh& mesh) {
  // Refused once, not by every rank: the others wait for the seed meanwhile.
  if (mesh.world().rank() == 0) settle_batch(o, mesh.shape().dp);
  Tensor seed = Tensor::from<int64_t>({int64_t(o.seed)}, {1}, o.device, Category::Buffers);
  mesh.world().broadcast(seed, 0).wait();
  o.seed = uint64_t(seed.values<int64_t>()[0]);
  settle_batch(o, mesh.shape().dp);
}

void print_plan(const Options& o, const Corpus& corpus) {
  print_plan(o, corpus, model_memory(o.config.parameters(), o.compute, o.gradients));
}

void print_plan(const Options& o, const Corpus& corpus, const ModelMemory& m) {
  const ModelConfig& c = o.config;
  int64_t n = c.parameters(), accumulation = o.accumulation();
  Feed feed(corpus, o);
  auto number = [](int64_t x) { return static_cast<long long>(x); };
  auto mebibytes = [](int64_t bytes) { return double(bytes) / (1 << 20); };
  std::printf(
      "model   %.2f M parameters: %lld layers, hidden %lld, %lld heads (%lld kv) of %lld, "
      "ffn %lld, vocabulary %lld\n",
      double(n) / 1e6, number(c.layers), number(c.hidden), number(c.heads), number(c.kv_heads),
      number(c.head_dim), number(c.ffn), number(c.vocab));
  std::string ranks = o.dp > 1 ? text(o.dp, " ranks x ") : "";
  std::printf("batch   %lld tokens a step = %s%lld micro-batch%s x %lld sequences x %lld tokens\n",
              number(o.batch_tokens), ranks.c_str(), number(accumulation),
              accumulation == 1 ? "" : "es", number(o.micro_batch), number(o.sequence));
  LearningRateSchedule schedule = update_rule(o, feed.steps()).schedule;
  std::string later = schedule.warmup < schedule.total
                          ? text("then a cosine to ", schedule.peak * schedule.floor)
                          : "which this run does not reach the end of";
  std::printf("steps   %lld, learning rate %g after %lld warm-up steps, %s\n", number(feed.steps()),
              schedule.peak, number(schedule.warmup), later.c_str());
  std::printf("data    %s\n", corpus.description().c_str());
  std::printf(
      "memory  %sweights %.1f MiB, gradients %.1f, master weights %.1f, moments %.1f; "
      "activations come on top\n",
      o.dp > 1 ? "of each rank: " : "", mebibytes(m.weights), mebibytes(m.gradients),
      mebibytes(m.master), mebibytes(m.moments));
  std::string threads =
      text(omp_get_max_threads(), omp_get_max_threads() == 1 ? " thread" : " threads");
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
  rule.schedule.warmup = o.warmup.value_or(std::min<int64_t>(50, steps / 5));
  return rule;
}

void start_weights(const std::vector<Stage*>& chunks, const std::vector<Owned>& owned,
                   const Options& o, Communicator* data) {
  if (o.hugging_face.empty()) return initialise(owned, o.seed);
  bool reads = !data || data->rank() == 0;
  std::optional<WeightFiles> files;
  if (reads) files.emplace(o.hugging_face);
  Weights parameters;
  for (const Stage* stage : chunks)
    for (Parameter* p : stage->parameters()) parameters.push_back(p);
  for (const Parameter* p : parameters) {
    Tensor weights;  // of all that this rank's copy of the parameter has
    if (reads) weights = read_parameter(*p, *files, o.config.tied);
    if (data) {
      if (!reads) weights = Tensor::empty(p->shard.local, DType::F32, Device::CPU);
      Tensor travels = weights.to(o.device);
      data->broadcast(travels, 0).wait();
      weights = travels.to(Device::CPU);
      device::synchronize();
    }
    for (const Owned& part : owned)
      if (part.parameter == p) assign(part, weights);
  }
  if (!reads) return;
  std::vector<std::string> names;  // of the whole model, of which these may be a part
  Stage whole(o.config, plain_parts(), o.compute, o.device);
  for (const Parameter* p : whole.parameters()) names.push_back(p->name);
  refuse_unused(*files, names, o.config.tied);
}

void show_sample(Stage& model, const Corpus& corpus, const Options& o, bool speaks,
                 Communicator* tp) {
  if (o.sample == 0) return;
  std::vector<int32_t> prompt = {corpus.token(Split::Validation, 0)};
  std::vector<int32_t> written =
      sample(model, prompt, o.sample, o.temperature, o.sequence, o.seed, tp);
  if (!speaks) return;
  std::printf("sample:\n");
  if (corpus.vocab() == 256) {
    std::printf("%s\n", printable(written).c_str());
  } else {
    for (int32_t token : written) std::printf("%d ", token);
    std::printf("\n");
  }
}

}  // namespace lockstep
