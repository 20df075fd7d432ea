#include "common/options.h"

#include <CLI/CLI.hpp>

#include "common/command_line.h"
#include "common/huggingface.h"

namespace lockstep {

ModelConfig preset(const std::string& name) {
  ModelConfig tiny{};
  if (name == "tiny") return tiny;
  auto shape = [](int64_t hidden, int64_t layers, int64_t heads, int64_t kv, int64_t ffn) {
    ModelConfig c;
    c.hidden = hidden;
    c.layers = layers;
    c.heads = heads;
    c.kv_heads = kv;
    c.head_dim = hidden / heads;
    c.ffn = ffn;
    c.vocab = 49152;
    return c;
  };
  // Shapes of the SmolLM family (Hugging Face, 2024), whose heads are tied: see --tied.
  if (name == "135M") return shape(576, 30, 9, 3, 1536);
  if (name == "360M") return shape(960, 32, 15, 5, 2560);
  if (name == "1.7B") return shape(2048, 24, 32, 32, 8192);
  fail(text("--model ", name, " is unknown: use tiny, 135M, 360M or 1.7B"));
}

int64_t accumulation_for(int64_t batch_tokens, int64_t micro_batch, int64_t sequence, int64_t dp) {
  int64_t forward = micro_batch * sequence * dp;
  require(dp == 1 || batch_tokens % forward == 0, "a global batch of ", batch_tokens,
          " tokens would be ", double(batch_tokens) / double(forward),
          " micro-batches for each of ", dp, " ranks, which take ", forward, " tokens at once (",
          dp, " x ", micro_batch, " x ", sequence, "): use a multiple of ", forward,
          " for --batch-tokens, another --micro-batch, or other ranks");
  require(batch_tokens >= forward && batch_tokens % forward == 0, "a global batch of ",
          batch_tokens, " tokens is no multiple of the ", forward, " tokens of one micro-batch (",
          micro_batch, " x ", sequence, "): use a multiple of ", forward,
          " for --batch-tokens, or a smaller --micro-batch");
  return batch_tokens / forward;
}

namespace {

struct Raw {  // what has no place in Options until everything is known
  std::string model, device = "auto", compute, gradients = "fp32", recompute = "none",
                     matmul = "library";
  std::optional<int64_t> layers, hidden, heads, kv_heads, head_dim, ffn, vocab;
  std::optional<int64_t> warmup;
  std::optional<double> dropout;
  bool tied = false;
};

constexpr int64_t kMillion = 1'000'000, kBillion = 1'000 * kMillion;

void add_model_flags(CLI::App& app, Options& o, Raw& raw) {
  app.add_option("--model", raw.model,
                 "tiny, 135M, 360M or 1.7B (SmolLM's shapes, which have --tied)");
  app.add_option("--hf", o.hugging_face, "start from a Hugging Face Llama directory");
  whole(app.add_option("--layers", raw.layers, "transformer blocks"), 1, 10'000);
  whole(app.add_option("--hidden", raw.hidden, "width of the residual stream"), 1, kMillion);
  whole(app.add_option("--heads", raw.heads, "query heads"), 1, kMillion);
  whole(app.add_option("--kv-heads", raw.kv_heads, "key/value heads (default: --heads)"), 1,
        kMillion);
  whole(app.add_option("--head-dim", raw.head_dim, "default: hidden / heads"), 1, kMillion);
  whole(app.add_option("--ffn", raw.ffn,
                       "width of the feed-forward block (default with --hidden: 3 x)"),
        1, kMillion);
  whole(app.add_option("--vocab", raw.vocab, "default: what the data needs"), 1, kMillion);
  app.add_option("--dropout", raw.dropout,
                 "probability, after the embedding and each block's two parts");
  app.add_flag("--tied", raw.tied, "head and embedding share one table");
}

void add_training_flags(CLI::App& app, Options& o, Raw& raw) {
  UpdateRule& u = o.update;
  auto number = [&](const char* name, auto& value, const char* what) {
    return app.add_option(name, value, what)->capture_default_str();
  };
  app.add_option("--data", o.data,
                 "text file, directory or llm.c .bin shards (default: C++ headers)");
  whole(number("--sequence", o.sequence, "tokens in a sequence"), 1, 100 * kMillion);
  whole(number("--micro-batch", o.micro_batch, "sequences in one forward"), 1, kMillion);
  whole(app.add_option("--batch-tokens", o.batch_tokens,
                       "tokens in a step (default: one micro-batch on each rank)"),
        1, 10 * kBillion);
  whole(number("--steps", o.steps, "optimizer steps"), 0, 100 * kMillion);
  whole(app.add_option("--epochs", o.epochs, "passes over the data, instead of --steps"), 1,
        kMillion);
  real(number("--learning-rate", u.schedule.peak, "at the end of the warm-up"), 0, kMillion, true);
  whole(app.add_option("--warmup", raw.warmup,
                       "steps of linear warm-up (default: 50, or a fifth of a short run)"),
        0, kBillion);
  real(number("--floor", u.schedule.floor, "last learning rate / peak"), 0, 1);
  real(number("--weight-decay", u.weight_decay, "of matrices"), 0, 1000);
  real(number("--clip", u.max_norm, "largest gradient norm, 0: none"), 0, kBillion);
  word(app.add_option("--dtype", raw.compute,
                      "fp32 or bf16 (default: bf16 on a GPU, fp32 on the CPU)"),
       {"fp32", "bf16"});
  word(number("--grad-dtype", raw.gradients, "fp32 or bf16"), {"fp32", "bf16"});
  word(number("--recompute", raw.recompute, "activations: none, selective or full"),
       {"none", "selective", "full"});
  word(number("--device", raw.device, "auto, cpu or cuda"), {"auto", "cpu", "cuda"});
  word(number("--matmul", raw.matmul,
              "large bf16 products on a Hopper GPU: by the last rung of 08_kernels where it was "
              "measured to be faster, or all by the library (ladder, library)"),
       {"ladder", "library"});
  whole(number("--seed", o.seed, "of weights, data order and dropout"), 0, INT64_MAX);
  whole(number("--evaluate-every", o.evaluate_every, "steps, 0: only at the end"), 0, kBillion);
  whole(number("--evaluation-batches", o.evaluation_batches, "micro-batches in an evaluation"), 1,
        kBillion);
  whole(number("--sample", o.sample, "tokens to generate at the end"), 0, kMillion);
  real(number("--temperature", o.temperature, "of the sample, 0: the likeliest token"), 0, 1000);
  output_file(app.add_option("--log", o.log, "write one JSON line per step to this file"));
  output_file(
      app.add_option("--trace", o.trace, "write a Chrome trace of three steps to this file"));
  app.add_flag("--profile", o.profile, "say where the time of three steps went");
  app.add_flag("--dry-run", o.dry_run, "print the plan and stop");
}

void add_checkpoint_flags(CLI::App& app, Options& o) {
  CLI::Option* dir = app.add_option("--checkpoint", o.checkpoint,
                                    "save the whole state of the run into this directory");
  auto number = [&](const char* name, int64_t& value, const char* what) {
    return app.add_option(name, value, what)->capture_default_str()->needs(dir);
  };
  whole(number("--checkpoint-every", o.checkpoint_every, "steps, 0: only after the last one"), 0,
        kBillion);
  whole(number("--keep", o.keep, "newest checkpoints that stay"), 1, kMillion);
  app.add_flag("--resume", o.resume, "go on from the newest complete checkpoint")->needs(dir);
  whole(app.add_option("--stop-after", o.stop_after, "save and stop after this step of the run")
            ->needs(dir),
        1, kBillion);
  app.add_option("--export", o.export_to, "write a Hugging Face directory at the end");
}

void settle_model(Options& o, const Raw& raw) {
  if (!o.hugging_face.empty()) {
    bool changed = raw.layers || raw.hidden || raw.heads || raw.kv_heads || raw.head_dim ||
                   raw.ffn || raw.vocab || raw.tied || !raw.model.empty();
    require(!changed, "--hf brings its own shape: leave out --model, --layers, --hidden, --heads, ",
            "--kv-heads, --head-dim, --ffn, --vocab and --tied");
    o.config = read_config(o.hugging_face);
    std::string last = text("model.layers.", o.config.layers - 1, ".input_layernorm.weight");
    require(WeightFiles(o.hugging_face).has(last), o.hugging_face, ": config.json says ",
            o.config.layers, " layers, but there is no ", last);
  } else {
    if (!raw.model.empty()) o.model = raw.model;
    ModelConfig c = preset(o.model);
    if (raw.heads) c.kv_heads = *raw.heads;
    c.layers = raw.layers.value_or(c.layers);
    c.heads = raw.heads.value_or(c.heads);
    c.kv_heads = raw.kv_heads.value_or(c.kv_heads);
    c.hidden = raw.hidden.value_or(c.hidden);
    require(raw.head_dim || c.hidden % c.heads == 0, "--hidden ", c.hidden,
            " cannot be cut into --heads ", c.heads, ": use a multiple of ", c.heads,
            ", or say --head-dim");
    c.head_dim = raw.head_dim.value_or(c.hidden / c.heads);
    c.ffn = raw.ffn.value_or(raw.hidden ? 3 * c.hidden : c.ffn);
    c.vocab = raw.vocab.value_or(o.model == "tiny" ? 0 : c.vocab);  // 0: the data's
    c.tied = raw.tied;
    o.config = c;
  }
  o.config.dropout = raw.dropout.value_or(o.config.dropout);
  require(o.config.max_length == 0 || o.sequence <= o.config.max_length, "--sequence ", o.sequence,
          " is longer than the ", o.config.max_length, " positions of ", o.hugging_face);
}

void settle_device(Options& o, const Raw& raw) {
  o.device = choose_device(raw.device);
  o.why_no_gpu = why_no_gpu(raw.device);
  o.compute = choose_type(raw.compute, o.device);
  o.gradients = choose_type(raw.gradients, o.device);
  o.recompute = raw.recompute == "full"        ? Recompute::Full
                : raw.recompute == "selective" ? Recompute::Selective
                                               : Recompute::None;
  o.ladder_matmul = raw.matmul == "ladder";
  require(!o.ladder_matmul || o.device == Device::CUDA,
          "--matmul ladder is a GPU's kernel, and this run is on the CPU: leave it out");
  require(o.gradients == DType::F32 || o.compute == DType::BF16,
          "--grad-dtype bf16 goes with --dtype bf16: fp32 training keeps fp32 gradients");
}

}  // namespace

void settle_batch(Options& o, int64_t dp) {
  o.dp = dp;
  if (o.batch_tokens == 0) o.batch_tokens = o.micro_batch * o.sequence * dp;
  accumulation_for(o.batch_tokens, o.micro_batch, o.sequence, dp);
}

std::optional<Options> parse_options(int argc, char** argv, const std::string& what_it_does,
                                     const std::function<void(CLI::App&)>& more) {
  auto options = parse_options_of_ranks(argc, argv, what_it_does, more);
  if (options) settle_batch(*options, 1);
  return options;
}

std::optional<Options> parse_options_of_ranks(int argc, char** argv,
                                              const std::string& what_it_does,
                                              const std::function<void(CLI::App&)>& more) {
  Options o;
  o.update.schedule.peak = 3e-3;
  Raw raw;
  CLI::App app(what_it_does);
  add_config_file(app);
  add_model_flags(app, o, raw);
  add_training_flags(app, o, raw);
  add_checkpoint_flags(app, o);
  if (more) more(app);
  if (!parse_flags(app, argc, argv)) return std::nullopt;
  o.warmup = raw.warmup;
  settle_device(o, raw);
  settle_model(o, raw);
  return o;
}

}  // namespace lockstep
