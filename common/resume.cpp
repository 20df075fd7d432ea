#include "common/resume.h"

#include <unistd.h>

#include <cstdio>

#include "common/huggingface.h"
#include "common/together.h"

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
                         int64_t steps, Communicator* world)
    : options_(options), optimizer_(optimizer), steps_(steps), world_(world) {
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
  const bool first = !world_ || world_->rank() == 0;
  // One rank looks, and reads every byte to see whether it is undamaged; each reads what it needs.
  const fs::path newest = together(world_, [&]() -> std::string {
    if (!first || !holds_checkpoints(options_.checkpoint)) return "";
    return latest_checkpoint(options_.checkpoint);
  })[0];
  if (newest.empty()) {
    if (first)
      std::printf("resume  %s holds no checkpoint: the run starts from the beginning\n",
                  options_.checkpoint.c_str());
    return 0;
  }
  int64_t done = 0;
  together(world_, [&] {
    Checkpoint checkpoint(newest);
    require_same_run(newest, checkpoint.manifest(), options_.config, settings_,
                     world_ ? world_->size() : 1);
    checkpoint.load(optimizer_);
    done = checkpoint.manifest().step;
    return "";
  });
  if (!first) return done;
  std::printf("resume  %s: %lld of %lld steps are done\n", newest.c_str(),
              static_cast<long long>(done), static_cast<long long>(steps_));
  std::fflush(stdout);
  return done;
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
                  {.keep = int(options_.keep)}, world_);
}

// Puts what this rank has of a parameter where it belongs in all of it.
static void place(const Owned& o, const Tensor& whole) {
  Tensor mine = o.value.to(Device::CPU, Category::Buffers);
  device::synchronize();
  IndexMap map = o.parameter->shard.index_map();
  with_type(whole.dtype(), [&](auto zero) {
    using T = decltype(zero);
    for (int64_t i = 0; i < mine.size(); ++i)
      whole.data<T>()[map.whole(o.first + i)] = mine.data<T>()[i];
  });
}

void export_weights(const std::vector<Owned>& owned, const Options& options, Communicator* world) {
  if (options.export_to.empty()) return;
  Stage model(options.config, plain_parts(), options.compute, options.device);
  NamedTensors weights;
  for (Parameter* p : model.parameters()) {
    Tensor whole = Tensor::zeros(p->shard.whole, options.compute, Device::CPU, Category::Buffers);
    for (const Owned& o : owned)
      if (o.counted && o.parameter->name == p->name) place(o, whole);
    if (world) {  // each element is some rank's, and zero on all others
      Tensor travels = whole.to(options.device, Category::Buffers);
      world->all_reduce(travels).wait();
      whole = travels.to(Device::CPU, Category::Buffers);
      device::synchronize();
    }
    if (!world || world->rank() == 0) weights.push_back({p->name, whole});
  }
  if (!world || world->rank() == 0) write_huggingface(options.export_to, options.config, weights);
}

}  // namespace lockstep
