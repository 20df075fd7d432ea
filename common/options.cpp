#include "common/options.h"

#include <CLI/CLI.hpp>
#include <iostream>
#include <nlohmann/json.hpp>

#include "common/device.h"
#include "common/huggingface.h"
#include "common/json.h"

namespace lockstep {

std::string one_line(std::string sentence) {
  for (char& c : sentence)
    if (c == '\n') c = ' ';
  return sentence;
}

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
  // Shapes of the SmolLM family (Hugging Face, 2024).
  if (name == "135M") return shape(576, 30, 9, 3, 1536);
  if (name == "360M") return shape(960, 32, 15, 5, 2560);
  if (name == "1.7B") return shape(2048, 24, 32, 32, 8192);
  fail(text("--model ", name, " is unknown: use tiny, 135M, 360M or 1.7B"));
}

int64_t accumulation_for(int64_t batch_tokens, int64_t micro_batch, int64_t sequence) {
  int64_t forward = micro_batch * sequence;
  require(batch_tokens >= forward && batch_tokens % forward == 0, "a global batch of ",
          batch_tokens, " tokens is no multiple of the ", forward, " tokens of one micro-batch (",
          micro_batch, " x ", sequence, "): use a multiple of ", forward,
          " for --batch-tokens, or a smaller --micro-batch");
  return batch_tokens / forward;
}

namespace {

// {"sequence": 256, "learning-rate": 0.001}: the keys are the flags without their dashes.
class JsonConfig : public CLI::Config {
 public:
  std::string to_config(const CLI::App*, bool, bool, std::string) const override { return ""; }
  std::vector<CLI::ConfigItem> from_config(std::istream& in) const override {
    std::string content(std::istreambuf_iterator<char>(in), {});
    nlohmann::json settings = parse_json(content, "the --config file");
    require(settings.is_object(), "the --config file must hold one JSON object");
    std::vector<CLI::ConfigItem> items;
    for (const auto& [key, value] : settings.items()) {
      require(!value.is_structured(), "the setting \"", key, "\" of the --config file must be a ",
              "number, a text or true/false");
      CLI::ConfigItem item;
      item.name = key;
      item.inputs = {value.is_string() ? value.get<std::string>() : value.dump()};
      items.push_back(item);
    }
    return items;
  }
};

struct Raw {  // what has no place in Options until everything is known
  std::string device = "auto", compute, gradients = "fp32";
  std::optional<int64_t> layers, hidden, heads, kv_heads, head_dim, ffn, vocab;
  std::optional<double> dropout;
  bool tied = false;
};

void add_model_flags(CLI::App& app, Options& o, Raw& raw) {
  app.add_option("--model", o.model, "tiny, 135M, 360M or 1.7B")->capture_default_str();
  app.add_option("--hf", o.hugging_face, "start from a Hugging Face Llama directory");
  app.add_option("--layers", raw.layers, "transformer blocks")->check(CLI::PositiveNumber);
  app.add_option("--hidden", raw.hidden, "width of the residual stream")
      ->check(CLI::PositiveNumber);
  app.add_option("--heads", raw.heads, "query heads")->check(CLI::PositiveNumber);
  app.add_option("--kv-heads", raw.kv_heads, "key/value heads")->check(CLI::PositiveNumber);
  app.add_option("--head-dim", raw.head_dim, "default: hidden / heads")->check(CLI::PositiveNumber);
  app.add_option("--ffn", raw.ffn, "width of the feed-forward block")->check(CLI::PositiveNumber);
  app.add_option("--vocab", raw.vocab, "default: what the data needs")->check(CLI::PositiveNumber);
  app.add_option("--dropout", raw.dropout, "probability, after each block's two parts");
  app.add_flag("--tied", raw.tied, "head and embedding share one table");
}

void add_training_flags(CLI::App& app, Options& o, Raw& raw) {
  UpdateRule& u = o.update;
  app.add_option("--data", o.data,
                 "text file, directory or llm.c .bin shards (default: C++ headers)");
  app.add_option("--sequence", o.sequence, "tokens in a sequence")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--micro-batch", o.micro_batch, "sequences in one forward")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--batch-tokens", o.batch_tokens, "tokens in a step (default: one micro-batch)")
      ->check(CLI::PositiveNumber);
  app.add_option("--steps", o.steps, "optimizer steps")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_option("--epochs", o.epochs, "passes over the data, instead of --steps")
      ->check(CLI::PositiveNumber);
  app.add_option("--learning-rate", u.schedule.peak, "at the end of the warm-up")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--warmup", u.schedule.warmup, "steps of linear warm-up")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_option("--floor", u.schedule.floor, "last learning rate / peak")
      ->capture_default_str()
      ->check(CLI::Range(0.0, 1.0));
  app.add_option("--weight-decay", u.weight_decay, "of matrices")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_option("--clip", u.max_norm, "largest gradient norm, 0: none")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_option("--dtype", raw.compute, "fp32 or bf16 (default: bf16 on a GPU, fp32 on the CPU)")
      ->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_option("--grad-dtype", raw.gradients, "fp32 or bf16")
      ->capture_default_str()
      ->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_option("--device", raw.device, "auto, cpu or cuda")
      ->capture_default_str()
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
  app.add_option("--seed", o.seed, "of weights, data order and dropout")->capture_default_str();
  app.add_option("--evaluate-every", o.evaluate_every, "steps, 0: only at the end")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_option("--evaluation-batches", o.evaluation_batches, "micro-batches in an evaluation")
      ->capture_default_str()
      ->check(CLI::PositiveNumber);
  app.add_option("--sample", o.sample, "tokens to generate at the end")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_option("--temperature", o.temperature, "of the sample, 0: the likeliest token")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_option("--log", o.log, "write one JSON line per step to this file");
  app.add_flag("--dry-run", o.dry_run, "print the plan and stop");
}

void settle_model(Options& o, const Raw& raw) {
  if (!o.hugging_face.empty()) {
    bool changed = raw.layers || raw.hidden || raw.heads || raw.kv_heads || raw.head_dim ||
                   raw.ffn || raw.vocab || raw.tied;
    require(!changed, "--hf brings its own shape: leave out --layers, --hidden, --heads, ",
            "--kv-heads, --head-dim, --ffn, --vocab and --tied");
    o.config = read_config(o.hugging_face);
  } else {
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
  bool gpu = raw.device != "cpu" && device::available();
  require(gpu || raw.device != "cuda", "--device cuda: ",
          device::why_not().empty() ? "this program was built without CUDA" : device::why_not());
  if (!gpu && raw.device == "auto") o.why_no_gpu = device::why_not();
  o.device = gpu ? Device::CUDA : Device::CPU;
  std::string compute = raw.compute.empty() ? (gpu ? "bf16" : "fp32") : raw.compute;
  o.compute = compute == "bf16" ? DType::BF16 : DType::F32;
  o.gradients = raw.gradients == "bf16" ? DType::BF16 : DType::F32;
  require(o.gradients == DType::F32 || o.compute == DType::BF16,
          "--grad-dtype bf16 goes with --dtype bf16: fp32 training keeps fp32 gradients");
}

}  // namespace

std::optional<Options> parse_options(int argc, char** argv, const std::string& what_it_does,
                                     const std::function<void(CLI::App&)>& more) {
  Options o;
  o.update.schedule = {.peak = 3e-3, .floor = 0.1, .warmup = 50, .total = 0};
  Raw raw;
  CLI::App app(what_it_does);
  app.option_defaults()->always_capture_default(false);
  app.config_formatter(std::make_shared<JsonConfig>());
  app.set_config("--config", "", "JSON file with any of these settings");
  app.allow_config_extras(CLI::config_extras_mode::error);
  add_model_flags(app, o, raw);
  add_training_flags(app, o, raw);
  if (more) more(app);
  try {
    app.parse(argc, argv);
  } catch (const CLI::CallForHelp&) {
    std::cout << app.help();
    return std::nullopt;
  } catch (const CLI::ParseError& e) {
    fail(one_line(e.what()) + " (--help lists all flags)");
  }
  settle_device(o, raw);
  settle_model(o, raw);
  if (o.batch_tokens == 0) o.batch_tokens = o.micro_batch * o.sequence;
  accumulation_for(o.batch_tokens, o.micro_batch, o.sequence);
  return o;
}

int run_main(int argc, char** argv, const std::function<int(int, char**)>& body) {
  try {
    return body(argc, argv);
  } catch (const Error& e) {
    std::cout.flush();
    std::cerr << "error: " << e.what() << "  [" << e.where.file_name() << ":" << e.where.line()
              << "]\n";
  } catch (const std::exception& e) {
    std::cout.flush();
    std::cerr << "error: " << e.what() << "\n";
  }
  return 1;
}

}  // namespace lockstep
