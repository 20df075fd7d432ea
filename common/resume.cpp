#include "common/resume.h"

#include <unistd.h>

#include <cstdio>

#include "common/huggingface.h"

namespace lockstep {

namespace fs = std::filesystem;

// A text is known by its length and by up to a million of its tokens, evenly spread: where it lies
// does not matter.
static std::string fingerprint(const Corpus& corpus) {
  constexpr int64_t kMost = 1 << 20;
  int64_t tokens = corpus.tokens(Split::Train), looked_at = std::min(tokens, kMost);
  ContentHash hash;
  for (int64_t i = 0; i < looked_at; ++i) {
    int32_t token = corpus.token(Split::Train, i * tokens / looked_at);
    hash.add({reinterpret_cast<const char*>(&token), sizeof token});
  }
  return text(tokens, " tokens with fingerprint ", hexadecimal(hash.value()));
}

CheckpointSettings run_settings(const Options& o, const Corpus& corpus, const UpdateRule& rule) {
  CheckpointSettings s;
  s.seed = o.seed;
  s.sequence = o.sequence;
  s.micro_batch = o.micro_batch;
  s.batch_tokens = o.batch_tokens;
  s.compute = o.compute;
  s.gradients = o.gradients;
  s.update = rule;
  s.data = fingerprint(corpus);
  return s;
}

// Hours later would be too late.
static void require_writable(const char* flag, const std::string& folder) {
  if (folder.empty()) return;
  std::error_code error;
  fs::create_directories(folder, error);
  require(!error && ::access(folder.c_str(), W_OK) == 0, flag, " ", folder,
          " cannot be written: ", error ? error.message() : "no permission");
}

Checkpoints::Checkpoints(const Options& options, const Corpus& corpus, AdamW& optimizer,
                         int64_t steps)
    : options_(options), optimizer_(optimizer), steps_(steps) {
  require_writable("--checkpoint", options.checkpoint);
  require_writable("--export", options.export_to);
  if (options.checkpoint.empty()) return;
  require(options.resume || !holds_checkpoints(options.checkpoint), "--checkpoint ",
          options.checkpoint, " already holds checkpoints: go on with --resume, or name another ",
          "directory");
  settings_ = run_settings(options, corpus, optimizer.rule());
}

int64_t Checkpoints::resume() {
  if (!options_.resume) return 0;
  if (!holds_checkpoints(options_.checkpoint)) {
    std::printf("resume  %s holds no checkpoint: the run starts from the beginning\n",
                options_.checkpoint.c_str());
    return 0;
  }
  Checkpoint newest(latest_checkpoint(options_.checkpoint));
  const Manifest& saved = newest.manifest();
  require_same_run(newest.path(), saved, options_.config, settings_);
  newest.load(optimizer_);
  std::printf("resume  %s: %lld of %lld steps are done\n", newest.path().c_str(),
              static_cast<long long>(saved.step), static_cast<long long>(steps_));
  std::fflush(stdout);
  return saved.step;
}

int64_t Checkpoints::last_step() const {
  return options_.stop_after > 0 ? std::min(options_.stop_after, steps_) : steps_;
}

bool Checkpoints::due(int64_t step) const {
  if (options_.checkpoint.empty()) return false;
  int64_t every = options_.checkpoint_every;
  return step == last_step() || (every > 0 && step % every == 0);
}

void Checkpoints::save(int64_t step) {
  save_checkpoint(options_.checkpoint, optimizer_, options_.config, settings_, step,
                  {.keep = int(options_.keep)});
}

void export_weights(const Stage& model, const Options& options) {
  if (options.export_to.empty()) return;
  NamedTensors weights;
  for (Parameter* p : model.parameters()) weights.push_back({p->name, p->value});
  write_huggingface(options.export_to, model.config(), weights);
}

}  // namespace lockstep
