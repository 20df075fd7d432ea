// Text from a trained model, one token after the other.
//
//   prompt ─▶ tokens ─▶ model over the whole prompt ─▶ logits ─▶ a token      prefill: many rows
//                        │  keys, values                            │
//                        ▼                                          ▼
//                    KV cache ◀────────── model over one row ◀── the token    decode: one row each
//
// Prefill is limited by arithmetic, as training is; decode reads every weight of the model for a
// single row, and is limited by memory. The two speeds are printed at the end. --no-cache shows
// what the cache is for: every token then runs the whole text so far.
//
//     ./lockstep train --checkpoint first                               train, and save the run
//     ./lockstep run 01 generate --checkpoint first --prompt "template <"
//     ./lockstep run 01 generate --hf DIR --prompt "Once upon a time"   a Hugging Face directory

#include <CLI/CLI.hpp>
#include <chrono>
#include <cstdio>
#include <optional>

#include "01_single_gpu/kv_cache.h"
#include "01_single_gpu/language.h"
#include "01_single_gpu/printer.h"
#include "01_single_gpu/sampling.h"
#include "01_single_gpu/source.h"
#include "common/command_line.h"
#include "common/device.h"
#include "common/options.h"
#include "common/text_files.h"

using namespace lockstep;

struct Flags {
  std::string hugging_face, checkpoint;  // one of them
  std::string prompt, prompt_file, tokenizer;
  std::string device = "auto", type;
  int64_t tokens = 200;
  Sampling sampling;
  uint64_t seed = 1;
  bool no_cache = false, dry_run = false;
};

static std::optional<Flags> parse(int argc, char** argv) {
  Flags f;
  CLI::App app("Generates text from a trained model.");
  auto* hf = app.add_option("--hf", f.hugging_face, "Hugging Face Llama directory");
  app.add_option("--checkpoint", f.checkpoint, "directory of a run's checkpoints, or one of them")
      ->excludes(hf);
  auto* prompt = app.add_option("--prompt", f.prompt, "text to go on from");
  app.add_option("--prompt-file", f.prompt_file, "the same, from a file")->excludes(prompt);
  app.add_option("--tokenizer", f.tokenizer,
                 "tokenizer.json (default: the one in the --hf directory, else bytes)");
  app.add_option("--tokens", f.tokens, "at most so many new ones")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_option("--temperature", f.sampling.temperature, "0: always the likeliest token")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_option("--top-k", f.sampling.top_k, "draw from the k likeliest tokens, 0: from all")
      ->capture_default_str()
      ->check(CLI::NonNegativeNumber);
  app.add_option("--top-p", f.sampling.top_p, "draw from the likeliest that hold this probability")
      ->capture_default_str()
      ->check(CLI::Range(1e-9, 1.0));
  app.add_option("--seed", f.seed, "of the draws")->capture_default_str();
  app.add_flag("--no-cache", f.no_cache, "run the whole text again for every token");
  app.add_option("--device", f.device, "auto, cpu or cuda")
      ->capture_default_str()
      ->check(CLI::IsMember({"auto", "cpu", "cuda"}));
  app.add_option("--dtype", f.type, "fp32 or bf16 (default: bf16 on a GPU, fp32 on the CPU)")
      ->check(CLI::IsMember({"fp32", "bf16"}));
  app.add_flag("--dry-run", f.dry_run, "print the plan and stop");
  if (!parse_flags(app, argc, argv)) return std::nullopt;
  require(!f.hugging_face.empty() || !f.checkpoint.empty(),
          "there is no model: say --hf DIR or --checkpoint DIR (./lockstep train --checkpoint DIR ",
          "makes one)");
  return f;
}

static std::string prompt_text(const Flags& f, const Language& language) {
  if (!f.prompt_file.empty()) {
    require(is_readable(f.prompt_file), "--prompt-file ", f.prompt_file, " cannot be read");
    return read_text(f.prompt_file);
  }
  if (!f.prompt.empty()) return f.prompt;
  if (!language.tokenizer) return "0";
  return f.checkpoint.empty() ? "Once upon a time" : "template <";  // of the default corpus
}

static std::vector<int32_t> read_prompt(const Flags& f, const Language& language, int64_t vocab) {
  std::vector<int32_t> ids = language.read(prompt_text(f, language));
  require(!ids.empty(), "the prompt is empty: a text that goes on needs a token to start from");
  for (int32_t id : ids)
    require(id < vocab, "the prompt's token ", id, " is none of the model's ", vocab);
  return ids;
}

struct Plan {
  Source source;
  Language language;
  std::vector<int32_t> prompt;
  Device device;
  DType compute;
  int64_t longest = 0;  // prompt and new tokens
};

static Plan make_plan(const Flags& f) {
  Plan p;
  p.device = choose_device(f.device);
  p.compute = choose_type(f.type, p.device);
  p.source =
      f.checkpoint.empty() ? open_hugging_face(f.hugging_face) : open_checkpoint(f.checkpoint);
  const ModelConfig& c = p.source.config;
  p.language = find_language(f.tokenizer, f.hugging_face, c.vocab);
  p.prompt = read_prompt(f, p.language, c.vocab);
  p.longest = int64_t(p.prompt.size()) + f.tokens;
  require(c.max_length == 0 || p.longest <= c.max_length, "a prompt of ", p.prompt.size(),
          " tokens and --tokens ", f.tokens, " are more than the model's ", c.max_length,
          " positions");
  return p;
}

static void show_plan(const Flags& f, const Plan& p) {
  const ModelConfig& c = p.source.config;
  double cache = f.no_cache ? 0 : double(KvCache::bytes(c, p.longest, p.compute)) / (1 << 20);
  std::string pick = "the likeliest token";
  if (f.sampling.temperature > 0) {
    pick = text("temperature ", f.sampling.temperature, ", seed ", f.seed);
    if (f.sampling.top_k > 0) pick += text(", top-k ", f.sampling.top_k);
    if (f.sampling.top_p < 1) pick += text(", top-p ", f.sampling.top_p);
  }
  std::printf("model   %.2f M parameters from %s\n", double(c.parameters()) / 1e6,
              p.source.where.c_str());
  std::printf("tokens  %zu in the prompt, at most %lld new; tokenizer: %s\n", p.prompt.size(),
              static_cast<long long>(f.tokens), p.language.description.c_str());
  std::printf("cache   %.2f MiB of keys and values\n", cache);
  std::printf("pick    %s\n", pick.c_str());
  std::printf("device  %s, %s\n\n", device::name(p.device).c_str(),
              p.compute == DType::BF16 ? "bf16" : "fp32");
  std::fflush(stdout);
}

static double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

static void generate(const Flags& f, const Plan& p) {
  KvCache cache(p.source.config, f.no_cache ? 0 : p.longest, p.compute, p.device);
  Parts parts = plain_parts();
  if (!f.no_cache) use_kv_cache(parts, cache);
  Stage model(p.source.config, parts, p.compute, p.device);
  load_weights(model, p.source);
  next_logits(model, {p.prompt[0]});  // untimed: the first forward pass starts the libraries
  cache.clear();

  Printer printer(stdout);
  for (int32_t id : p.prompt) printer.print(p.language.write(id));
  auto begin = std::chrono::steady_clock::now();
  std::vector<float> logits = next_logits(model, p.prompt);
  double prefill = seconds_since(begin);

  RandomStream draw(f.seed, "sample");
  std::vector<int32_t> all = p.prompt;
  int64_t passes = 0;  // after the prompt's
  begin = std::chrono::steady_clock::now();
  for (int64_t i = 0; i < f.tokens; ++i) {
    int32_t id = next_token(logits, f.sampling, draw.uniform(uint64_t(i)));
    all.push_back(id);
    printer.print(p.language.write(id));
    bool ends = std::count(p.source.ends.begin(), p.source.ends.end(), id) > 0;
    if (ends || i + 1 == f.tokens) break;
    logits = f.no_cache ? next_logits(model, all) : next_logits(model, {id}, cache.length());
    ++passes;
  }
  double decode = seconds_since(begin);
  printer.finish();
  std::printf("\n\nprefill %zu tokens in %.1f ms, %.0f tokens/s\n", p.prompt.size(), 1e3 * prefill,
              double(p.prompt.size()) / prefill);
  std::printf("decode  %lld tokens in %.1f ms, %.0f tokens/s\n", static_cast<long long>(passes),
              1e3 * decode, double(passes) / decode);
}

int main(int argc, char** argv) {
  return run_main(argc, argv, [](int argc, char** argv) {
    auto flags = parse(argc, argv);
    if (!flags) return 0;
    if (flags->dry_run && !flags->checkpoint.empty() &&
        !std::filesystem::exists(flags->checkpoint)) {
      std::printf("model   none yet: %s holds no checkpoint\n", flags->checkpoint.c_str());
      return 0;
    }
    Plan plan = make_plan(*flags);
    show_plan(*flags, plan);
    if (!flags->dry_run) generate(*flags, plan);
    return 0;
  });
}
