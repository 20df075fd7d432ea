// Checkpoints as the user of the program meets them: stop, crash, resume, export.

#include <gtest/gtest.h>

#include <nlohmann/json.hpp>

#include "common/huggingface.h"
#include "tests/checkpoints.h"

namespace lockstep {
namespace {

namespace fs = std::filesystem;

struct Output {
  int status = 0;
  std::string out;  // stdout and stderr
};

Output shell(const std::string& command) {
  Output run;
  FILE* pipe = popen(("exec 2>&1; " + command).c_str(), "r");
  char buffer[4096];
  while (size_t n = fread(buffer, 1, sizeof buffer, pipe)) run.out.append(buffer, n);
  run.status = pclose(pipe);
  return run;
}

// A run of ten steps on a text of 15 windows: epochs end in the middle of steps 4 and 8.
struct Program {
  Program() {
    std::string content;
    for (int i = 0; i < 15 * 16 + 1 + 17; ++i) content += char('a' + i * i % 23);
    text_file = folder.write("text.txt", content);
    nlohmann::json settings = {{"layers", 2},    {"hidden", 16},        {"heads", 2},
                               {"sequence", 16}, {"micro-batch", 2},    {"batch-tokens", 64},
                               {"dropout", 0.2}, {"steps", 10},         {"warmup", 3},
                               {"sample", 0},    {"evaluate-every", 4}, {"data", text_file}};
    folder.write("run.json", settings.dump());
  }
  // Flags win over what stands in run.json.
  std::string command(const std::string& flags) const {
    return text(LOCKSTEP_BINARY_DIR "/01_single_gpu/train --config ", at("run.json"), " ", flags);
  }
  Output train(const std::string& flags) const { return shell(command(flags)); }
  std::string at(const std::string& name) const { return folder / name; }

  // Of every step that was logged, what does not depend on the clock. A step that was logged twice,
  // before a crash and after it, must have the same numbers both times.
  std::map<int64_t, std::string> log(const std::string& name) const {
    std::map<int64_t, std::string> steps;
    std::istringstream lines(content_of(folder / name));
    for (std::string line; std::getline(lines, line);) {
      nlohmann::json json = nlohmann::json::parse(line);
      if (!json.contains("loss")) continue;
      nlohmann::json kept;
      for (const char* key : {"loss", "gradient_norm", "learning_rate", "tokens", "valid_tokens"})
        kept[key] = json.at(key);
      auto [known, fresh] = steps.try_emplace(json.at("step"), kept.dump());
      EXPECT_EQ(known->second, kept.dump()) << "step " << json.at("step");
    }
    return steps;
  }
  std::string weights(const std::string& name) const {
    return hexadecimal(hash_of_file(folder / name / "model.safetensors"));
  }
  TemporaryFolder folder;
  fs::path text_file;
};

std::vector<std::string> kinds() {
  std::vector<std::string> all = {"--device cpu --dtype fp32",
                                  "--device cpu --dtype bf16 --grad-dtype bf16"};
  if (device::available()) all.push_back("--device cuda --dtype bf16");
  return all;
}

TEST(CheckpointProgram, Pitfall118_StoppedAndResumedRunEqualsTheWholeOne) {
  for (const std::string& kind : kinds()) {
    SCOPED_TRACE(kind);
    Program p;
    Output whole = p.train(text(kind, " --log ", p.at("whole"), " --export ", p.at("a")));
    ASSERT_EQ(whole.status, 0) << whole.out;
    const std::string run = text(kind, " --checkpoint ", p.at("run"), " --log ", p.at("parts"));
    Output first = p.train(run + " --stop-after 5");
    ASSERT_EQ(first.status, 0) << first.out;
    EXPECT_EQ(p.log("parts").size(), 5u);
    Output second = p.train(text(run, " --resume --export ", p.at("b")));
    ASSERT_EQ(second.status, 0) << second.out;
    EXPECT_NE(second.out.find("run/step_00000005: 5 of 10 steps are done"), std::string::npos)
        << second.out;

    EXPECT_EQ(p.log("whole").size(), 10u);
    EXPECT_EQ(p.log("parts"), p.log("whole"));
    EXPECT_EQ(p.weights("b"), p.weights("a"));
    auto last_line = [](const std::string& out) {
      return out.substr(out.rfind('\n', out.size() - 2) + 1);
    };
    EXPECT_EQ(last_line(second.out), last_line(whole.out));  // the validation loss

    Output third = p.train(text(run, " --resume --export ", p.at("c")));  // nothing is left to do
    EXPECT_EQ(third.status, 0) << third.out;
    EXPECT_EQ(p.weights("c"), p.weights("a"));
    EXPECT_EQ(p.log("parts").size(), 10u);
  }
}

TEST(CheckpointProgram, Pitfall119_KilledProgramGoesOnFromItsLastCheckpoint) {
  Program p;
  const std::string run =
      text("--device cpu --checkpoint ", p.at("run"), " --checkpoint-every 1 --log ", p.at("log"));
  ASSERT_EQ(p.train(text("--device cpu --export ", p.at("a"), " --log ", p.at("whole"))).status, 0);
  Output killed = shell(text(p.command(run + " --keep 10"), " & while [ ! -e ", p.at("run"),
                             "/step_00000003 ] && kill -0 $!; do sleep 0.002; done; kill -9 $!"));
  ASSERT_TRUE(holds_checkpoints(p.at("run"))) << killed.out;
  Output resumed = p.train(text(run, " --resume --export ", p.at("b")));
  ASSERT_EQ(resumed.status, 0) << resumed.out;
  EXPECT_EQ(p.weights("b"), p.weights("a"));
  EXPECT_EQ(p.log("log"), p.log("whole"));
  EXPECT_EQ(names_in(p.at("run")), (std::vector<std::string>{"step_00000009", "step_00000010"}));
}

TEST(CheckpointProgram, KeepsAsManyAsAsked) {
  Program p;
  Output run =
      p.train(text("--device cpu --checkpoint ", p.at("run"), " --checkpoint-every 3 --keep 3"));
  ASSERT_EQ(run.status, 0) << run.out;
  EXPECT_EQ(names_in(p.at("run")),
            (std::vector<std::string>{"step_00000006", "step_00000009", "step_00000010"}));
}

TEST(CheckpointProgram, ExportIsWhatTheCheckpointHolds) {
  Program p;
  Output run =
      p.train(text("--device cpu --tied --checkpoint ", p.at("run"), " --export ", p.at("hf")));
  ASSERT_EQ(run.status, 0) << run.out;
  const fs::path saved = latest_checkpoint(p.at("run"));
  ModelConfig config = checkpoint_config(saved);
  EXPECT_TRUE(config.tied);
  Stage model(config, plain_parts(), DType::F32, Device::CPU);
  WeightFiles files(p.at("hf"));
  EXPECT_EQ(files.names().size(), model.parameters().size());
  for (Parameter* parameter : model.parameters())
    EXPECT_EQ(bytes_of(checkpoint_parameter(saved, *parameter)),
              bytes_of(read_parameter(*parameter, files, true)))
        << parameter->name;
  Output again =
      shell(text(LOCKSTEP_BINARY_DIR "/01_single_gpu/train --device cpu --steps 1 ",
                 "--sequence 16 --sample 0 --hf ", p.at("hf"), " --data ", p.text_file.string()));
  EXPECT_EQ(again.status, 0) << again.out;  // and a run can start from it
}

TEST(CheckpointProgram, RefusalsAreOneSentence) {
  Program p;
  auto refused = [&](const std::string& flags, const std::vector<std::string>& parts) {
    Output run = p.train("--device cpu " + flags);
    EXPECT_NE(run.status, 0) << flags;
    const std::string error = run.out.substr(std::min(run.out.find("error: "), run.out.size()));
    EXPECT_EQ(std::count(error.begin(), error.end(), '\n'), 1) << run.out;
    EXPECT_EQ(run.out.find("step 1/"), std::string::npos) << run.out;  // no work was done
    for (const std::string& part : parts)
      EXPECT_NE(error.find(part), std::string::npos) << run.out << " should name " << part;
  };
  for (const char* flag : {"--resume", "--checkpoint-every 2", "--stop-after 3", "--keep 2"})
    refused(flag, {std::string(flag).substr(0, 6), "--checkpoint"});
  refused("--checkpoint /proc/none", {"--checkpoint /proc/none", "cannot be written"});
  refused("--export /proc/none", {"--export /proc/none", "cannot be written"});
  refused("--keep 0 --checkpoint x", {"--keep"});

  const std::string run = "--checkpoint " + p.at("run");
  Output fresh = p.train("--device cpu --resume --stop-after 2 " + run);
  EXPECT_EQ(fresh.status, 0) << fresh.out;
  EXPECT_NE(fresh.out.find("holds no checkpoint: the run starts from the beginning"),
            std::string::npos);
  refused(run, {"already holds checkpoints", "--resume"});
  refused(run + " --resume --seed 7", {"step_00000002", "seed 1", "7"});
  refused(run + " --resume --batch-tokens 32", {"batch-tokens 64", "32"});
  refused(run + " --resume --steps 20", {"steps 10", "20"});
  refused(run + " --resume --dropout 0.5", {"dropout 0.2", "0.5"});
  std::ofstream(p.text_file, std::ios::app) << "more";
  refused(run + " --resume", {"data", "241 tokens", "245 tokens"});
  fs::remove(latest_checkpoint(p.at("run")) / "manifest.json");
  refused(run + " --resume", {"holds no complete checkpoint", "1 damaged"});
}

}  // namespace
}  // namespace lockstep
