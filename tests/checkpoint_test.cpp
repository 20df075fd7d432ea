// A run that was saved and loaded goes on bit by bit; what cannot be right is refused or passed
// over, in one sentence. (Kills in the middle of a save: checkpoint_kill_test.cpp.)

#include "common/checkpoint.h"

#include <gtest/gtest.h>

#include "common/feed.h"
#include "common/resume.h"
#include "tests/checkpoints.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

struct Precision {
  Device device;
  DType compute, gradients;
};

std::vector<Precision> precisions() {
  std::vector<Precision> all = {{Device::CPU, DType::F64, DType::F64}};
  for (Device device : devices())
    for (auto [compute, gradients] :
         {std::pair(DType::F32, DType::F32), {DType::BF16, DType::F32}, {DType::BF16, DType::BF16}})
      all.push_back({device, compute, gradients});
  return all;
}

// Training on a text whose epochs are no multiple of a step: 15 windows, 4 of them in each step.
struct Training {
  Training(const Precision& precision, const fs::path& file, uint64_t weights)
      : options(make_options(precision)),
        corpus(CorpusOptions{file.string(), options.sequence}),
        feed(corpus, options),
        rig(make_rig(precision, weights)) {}

  static Options make_options(const Precision& precision) {
    Options o;
    o.sequence = 8;
    o.micro_batch = 2;
    o.batch_tokens = 2 * 2 * 8;  // two micro-batches
    o.steps = 10;
    o.device = precision.device;
    return o;
  }
  static Rig::Settings make_rig(const Precision& precision, uint64_t weights) {
    Rig::Settings s;
    s.config.vocab = 256;
    s.config.dropout = 0.2;
    s.compute = precision.compute;
    s.gradients = precision.gradients;
    s.device = precision.device;
    s.rule.schedule = {.peak = 0.01, .floor = 0.1, .warmup = 3, .total = 10};
    s.rule.max_norm = 0.5f;
    s.seed = weights;
    return s;
  }
  // The state after step `number`, byte by byte: loss, norm, t, learning rate, clip factor.
  std::string step(int64_t number) {
    StepBatch batch = feed.step(number - 1);
    rig.step(batch.micro_batches, batch.valid);
    return bytes_of(rig.optimizer->state());
  }
  CheckpointSettings settings() const {
    return run_settings(options, corpus, rig.optimizer->rule());
  }

  Options options;
  Corpus corpus;
  Feed feed;
  Rig rig;
};

TEST(Checkpoint, Pitfall118_ResumeIsBitwise) {
  TemporaryFolder folder;
  std::string content;
  for (int i = 0; i < 15 * 8 + 1 + 9; ++i) content += char('a' + i * i % 23);
  const fs::path file = folder.write("text.txt", content);
  for (const Precision& precision : precisions()) {
    SCOPED_TRACE(text("device ", int(precision.device), ", ", name_of(precision.compute), ", ",
                      name_of(precision.gradients)));
    Training whole(precision, file, 1), first(precision, file, 1), second(precision, file, 2);
    ASSERT_EQ(whole.corpus.windows(Split::Train, 8), 15);  // epochs end within steps 4 and 8
    std::vector<std::string> states;
    for (int64_t step = 1; step <= 10; ++step) states.push_back(whole.step(step));
    for (int64_t step = 1; step <= 5; ++step) EXPECT_EQ(first.step(step), states[size_t(step - 1)]);

    const fs::path dir = folder / text("run", int(precision.device), name_of(precision.compute),
                                       name_of(precision.gradients));
    save_checkpoint(dir, *first.rig.optimizer, first.rig.settings.config, first.settings(), 5,
                    {.file_bytes = 1000});
    ASSERT_NE(everything(second.rig), everything(first.rig));  // other weights, until it loads
    const fs::path saved = latest_checkpoint(dir);
    ASSERT_EQ(load_checkpoint(saved, *second.rig.optimizer), 5);
    EXPECT_EQ(everything(second.rig), everything(first.rig));
    for (int64_t step = 6; step <= 10; ++step)
      EXPECT_EQ(second.step(step), states[size_t(step - 1)]) << "step " << step;
    EXPECT_EQ(everything(second.rig), everything(whole.rig));
    EXPECT_EQ(second.rig.state().updates, 10);
    EXPECT_NE(states[8], states[9]);  // these bytes do change
    require_same_run(saved, read_manifest(saved), second.rig.settings.config, second.settings());
  }
}

TEST(Checkpoint, ManifestSaysWhereTheDataStood) {
  TemporaryFolder folder;
  Saved saved(folder.path(), 7);
  EXPECT_EQ(read_manifest(saved.path).next_sample(), 7 * 4);
  EXPECT_NE(content_of(saved.path / "manifest.json").find("\"next_sample\": 28"),
            std::string::npos);
}

TEST(Checkpoint, SettingsAndModelComeBackExactly) {
  TemporaryFolder folder;
  Saved saved(folder.path(), 1);
  CheckpointSettings s;
  s.seed = UINT64_MAX - 4;
  s.sequence = 3, s.micro_batch = 5, s.batch_tokens = 30;
  s.compute = DType::BF16, s.gradients = DType::BF16;
  s.update = {{1e-3 / 3, 0.1, 11, 17}, 0.91f, 0.951f, 1e-7f, 0.11f, 0.7f};
  s.data = "3 tokens \"of\" a kind";
  ModelConfig c = small_config();
  c.rope_theta = 5e5 / 7, c.dropout = 0.1, c.tied = true, c.mlp_bias = true, c.max_length = 77;
  save_checkpoint(folder / "b", *saved.rig.optimizer, c, s, 3);
  const fs::path path = latest_checkpoint(folder / "b");
  require_same_run(path, read_manifest(path), c, s);  // every field, through JSON
  EXPECT_EQ(checkpoint_settings(path).seed, s.seed);
  EXPECT_EQ(checkpoint_settings(path).update.beta1, s.update.beta1);
  EXPECT_EQ(checkpoint_config(path).rope_theta, c.rope_theta);
  EXPECT_EQ(checkpoint_config(path).parameters(), c.parameters());
}

TEST(Checkpoint, Pitfall118_AnotherRunIsRefusedWithBothValues) {
  TemporaryFolder folder;
  Saved saved(folder.path(), 1);
  const Manifest manifest = read_manifest(saved.path);
  auto refused = [&](auto change, const std::vector<std::string>& parts) {
    Manifest other = manifest;
    change(other.config, other.settings);
    expect_refusal([&] { require_same_run(saved.path, manifest, other.config, other.settings); },
                   parts);
  };
  using C = ModelConfig&;
  using S = CheckpointSettings&;
  refused([](C, S s) { s.seed = 9; }, {"step_00000001", "seed 1", "9"});
  refused([](C, S s) { s.sequence = 9; }, {"sequence 8", "9"});
  refused([](C, S s) { s.batch_tokens = 64; }, {"batch-tokens 32", "64"});
  refused([](C, S s) { s.micro_batch = 4; }, {"micro-batch 2", "4"});
  refused([](C, S s) { s.compute = DType::BF16; }, {"dtype \"fp32\"", "bf16"});
  refused([](C, S s) { s.gradients = DType::BF16; }, {"grad-dtype \"fp32\"", "bf16"});
  refused([](C, S s) { s.update.schedule.peak = 0.5; }, {"learning-rate 0.001", "0.5"});
  refused([](C, S s) { s.update.schedule.total = 5; }, {"steps 0", "5"});
  refused([](C, S s) { s.update.beta2 = 0.5f; }, {"beta2 ", "0.5"});
  refused([](C, S s) { s.data = "other"; }, {"data \"text\"", "other"});
  refused([](C c, S) { c.layers = 3; }, {"layers 2", "3"});
  refused([](C c, S) { c.dropout = 0.5; }, {"dropout 0.0", "0.5"});
  refused([](C c, S) { c.tied = true; }, {"tied false", "true"});
}

TEST(Checkpoint, AnotherModelIsRefusedBeforeAnythingChanges) {
  TemporaryFolder folder;
  Saved saved(folder.path(), 1);
  auto refused = [&](auto change, const std::vector<std::string>& parts) {
    Rig::Settings s;
    change(s);
    Rig other(s);
    const std::string before = everything(other);
    expect_refusal([&] { load_checkpoint(saved.path, *other.optimizer); }, parts);
    EXPECT_EQ(everything(other), before);
  };
  refused([](Rig::Settings& s) { s.config.ffn = 32; }, {"gate_proj", "[24, 16]", "[32, 16]"});
  refused([](Rig::Settings& s) { s.config.layers = 3; }, {"holds no master/model.layers.2."});
  refused([](Rig::Settings& s) { s.compute = DType::F64; }, {"F32", "F64"});
}

TEST(Checkpoint, ALossThatIsNotFiniteIsNotSaved) {
  TemporaryFolder folder;
  Saved saved(folder.path(), 1);
  StepState state = saved.rig.state();
  state.stopped = 1;
  state.loss = NAN;
  std::memcpy(saved.rig.optimizer->state().raw(), &state, sizeof state);
  expect_refusal([&] { saved.save(2); }, {"step 2 is not saved", "nan"});
  EXPECT_EQ(latest_checkpoint(folder.path()), saved.path);
}

// ---- Files

TEST(Checkpoint, FilesAreCutAtTheLimit) {
  TemporaryFolder folder;
  Saved saved(folder.path(), 1, {.file_bytes = 4000});
  std::vector<SavedFile> files = read_manifest(saved.path).files;
  EXPECT_GT(files.size(), 5u);
  for (const SavedFile& f : files) {
    int64_t data = 0;
    SafetensorsFile file(saved.path / f.name);
    for (const std::string& name : file.names()) data += file.read(name).bytes();
    EXPECT_TRUE(data <= 4000 || file.names().size() == 1) << f.name << " " << data;
  }
  EXPECT_EQ(files[0].name, "rank_0_of_1-00001.safetensors");
  Rig other({.seed = 99});
  load_checkpoint(saved.path, *other.optimizer);
  EXPECT_EQ(everything(other), everything(saved.rig));
}

TEST(Checkpoint, KeepsTheNewestAndRemovesLeftovers) {
  TemporaryFolder folder;
  folder.write("step_00000001.partial/rank_0_of_1-00001.safetensors", "half");
  folder.write("step_00000000.trash/manifest.json", "{}");
  folder.write("notes.txt", "stays");
  Saved saved(folder.path(), 1);
  for (int64_t step = 2; step <= 5; ++step) saved.save(step, {.keep = 3});
  EXPECT_EQ(names_in(folder.path()), (std::vector<std::string>{"notes.txt", "step_00000003",
                                                               "step_00000004", "step_00000005"}));
  saved.save(6, {.keep = 1});
  EXPECT_EQ(names_in(folder.path()), (std::vector<std::string>{"notes.txt", "step_00000006"}));
  expect_refusal([&] { saved.save(7, {.keep = 0}); }, {"keeping 0", "at least 1"});
}

TEST(Checkpoint, ACompleteOneIsNotReplacedADamagedOneIs) {
  TemporaryFolder folder;
  Saved saved(folder.path(), 5);
  expect_refusal([&] { saved.save(5); }, {"step_00000005", "is not replaced"});
  EXPECT_EQ(names_in(folder.path()), std::vector<std::string>{"step_00000005"});
  fs::remove(saved.path / "manifest.json");
  saved.save(5);
  EXPECT_EQ(latest_checkpoint(folder.path()), saved.path);
}

TEST(Checkpoint, DirectoriesWithoutOneAreNamed) {
  TemporaryFolder folder;
  EXPECT_FALSE(holds_checkpoints(folder.path()));
  EXPECT_FALSE(holds_checkpoints(folder / "absent"));
  expect_refusal([&] { latest_checkpoint(folder / "absent"); }, {"absent", "not a directory"});
  expect_refusal([&] { latest_checkpoint(folder.path()); }, {"no complete checkpoint"});
  expect_refusal([&] { load_checkpoint(folder.path(), *Rig({}).optimizer); }, {"manifest.json"});
  Saved saved(folder.path(), 3);
  EXPECT_EQ(latest_checkpoint(saved.path), saved.path);  // one of them can be named, too
}

TEST(Checkpoint, ContentHashSeesEveryBitAndTheLength) {
  auto hash = [](const std::string& content, size_t cut) {
    ContentHash h;
    h.add(std::string_view(content).substr(0, cut));
    h.add(std::string_view(content).substr(cut));
    return h.value();
  };
  std::string content = "forty-one bytes: five words and a bit....";
  const uint64_t whole = hash(content, 0);
  for (size_t cut = 0; cut <= content.size(); ++cut) EXPECT_EQ(hash(content, cut), whole);
  for (size_t bit = 0; bit < 8 * content.size(); ++bit) {
    std::string changed = content;
    changed[bit / 8] = char(changed[bit / 8] ^ 1 << bit % 8);
    EXPECT_NE(hash(changed, 0), whole) << bit;
    changed[(bit / 8 + 8) % content.size()] ^= char(0x80);  // two signs: no cancelling out
    EXPECT_NE(hash(changed, 0), whole) << bit;
  }
  EXPECT_NE(hash(content + '\0', 0), whole);
}

}  // namespace
}  // namespace lockstep
