// The program generate as its user meets it: text, files, refusals.

#include <gtest/gtest.h>

#include <algorithm>
#include <sstream>

#include "common/huggingface.h"
#include "tests/rig.h"
#include "tests/shell.h"

namespace lockstep {
namespace {

const std::string kReference = LOCKSTEP_SOURCE_DIR "/tests/reference/";
using Ids = std::vector<int32_t>;

Output generate(const std::string& flags) {
  return shell(LOCKSTEP_BINARY_DIR "/01_single_gpu/generate " + flags);
}

const std::string kTiny = "--device cpu --hf " + kReference + "tiny_llama ";

// Between the plan and the speeds.
std::string text_of(const Output& run) {
  size_t begin = run.out.find("\n\n"), end = run.out.find("\n\nprefill");
  EXPECT_EQ(run.status, 0) << run.out;
  return begin < end && end != run.out.npos ? run.out.substr(begin + 2, end - begin - 2) : "";
}

TEST(GenerateProgram, GoesOnFromThePromptAndSaysHowFast) {
  Output run = generate(kTiny + "--prompt '5 6 7' --tokens 9 --temperature 0");
  std::string text = text_of(run);
  EXPECT_EQ(text.rfind("5 6 7 ", 0), 0u) << run.out;
  EXPECT_EQ(std::count(text.begin(), text.end(), ' '), 12) << run.out;
  EXPECT_TRUE(run.says("prefill 3 tokens in ") && run.says("decode  8 tokens in ")) << run.out;
  EXPECT_EQ(text_of(generate(kTiny + "--prompt '5 6 7' --tokens 9 --temperature 0 --no-cache")),
            text);
}

TEST(GenerateProgram, SeedsAreReproducible) {
  std::string flags = kTiny + "--prompt '5 6 7' --tokens 40 --temperature 1.5 --top-p 0.95 ";
  std::string first = text_of(generate(flags + "--seed 8"));
  EXPECT_EQ(text_of(generate(flags + "--seed 8")), first);
  EXPECT_NE(text_of(generate(flags + "--seed 9")), first);
}

// A model of random weights with the vocabulary of a tokenizer, and its end token.
void write_model(const TemporaryFolder& folder, int64_t vocab, const char* tokenizer) {
  Rig::Settings s;
  s.config.vocab = vocab;
  Rig rig(s);
  NamedTensors weights;
  for (const Owned& o : rig.parallel.owned()) weights.push_back({o.parameter->name, o.value});
  write_huggingface(folder.path(), s.config, weights);
  std::string file = kReference + "tokenizers/" + tokenizer + ".json";
  folder.write("tokenizer.json", content_of(file));
}

TEST(GenerateProgram, ReadsAndWritesTextWithTheTokenizerOfTheDirectory) {
  TemporaryFolder folder;
  write_model(folder, 906, "llama3");
  std::string flags = "--device cpu --tokens 5 --hf " + folder.path().string();
  Output run = generate(flags + " --prompt 'Hello you'");
  EXPECT_EQ(text_of(run).rfind("<|begin_of_text|>Hello you", 0), 0u) << run.out;
  EXPECT_TRUE(run.says("tokenizer.json")) << run.out;
  folder.write("prompt.txt", "from a file\n");
  run = generate(flags + " --prompt-file " + (folder / "prompt.txt").string());
  EXPECT_EQ(text_of(run).rfind("<|begin_of_text|>from a file\n", 0), 0u) << run.out;
}

Ids ids_of(const std::string& text) {
  std::istringstream in(text);
  return {std::istream_iterator<int32_t>(in), {}};
}

TEST(GenerateProgram, StopsAtTheTokenThatEndsATextOfThisModel) {
  TemporaryFolder folder;
  write_model(folder, 300, "gpt2");
  std::filesystem::remove(folder / "tokenizer.json");
  std::string flags =
      "--device cpu --temperature 0 --prompt '1 2 3' --tokens 8 --hf " + folder.path().string();
  Ids ids = ids_of(text_of(generate(flags)));
  ASSERT_EQ(ids.size(), 11u);
  std::string config = content_of(folder / "config.json");
  folder.write("config.json", text("{\"eos_token_id\": [299, ", ids[5], "], ", config.substr(1)));
  Ids shorter = ids_of(text_of(generate(flags)));
  auto end = std::find(ids.begin() + 3, ids.end(), ids[5]);
  EXPECT_EQ(shorter, Ids(ids.begin(), end + 1));
}

TEST(GenerateProgram, DryRunPrintsThePlanAlone) {
  Output run = generate(kTiny + "--dry-run --tokens 9 --top-k 5");
  EXPECT_EQ(run.status, 0);
  for (const char* word : {"model ", "tokens ", "cache ", "pick ", "top-k 5", "device "})
    EXPECT_TRUE(run.says(word)) << run.out;
  EXPECT_FALSE(run.says("prefill"));
  run = generate("--dry-run --checkpoint /nowhere/at/all");
  EXPECT_TRUE(run.status == 0 && run.says("/nowhere/at/all")) << run.out;
}

TEST(GenerateProgram, RefusesInOneSentence) {
  auto refuses = [](const std::string& flags, const std::vector<std::string>& parts) {
    Output run = generate(flags);
    EXPECT_EQ(run.status, 1) << flags;
    EXPECT_EQ(std::count(run.out.begin(), run.out.end(), '\n'), 1) << run.out;
    EXPECT_EQ(run.out.rfind("error: ", 0), 0u) << run.out;
    for (const std::string& part : parts) EXPECT_TRUE(run.says(part)) << run.out << part;
  };
  refuses("", {"--hf", "--checkpoint"});
  refuses("--hf /nowhere/at/all", {"/nowhere/at/all"});
  refuses("--checkpoint /nowhere/at/all", {"/nowhere/at/all"});
  refuses(kTiny + "--checkpoint here", {"--hf", "--checkpoint"});
  refuses(kTiny + "--prompt a --prompt-file b", {"--prompt"});
  refuses(kTiny + "--prompt-file /nowhere/a.txt", {"/nowhere/a.txt"});
  refuses(kTiny + "--prompt hello", {"hello", "--tokenizer"});
  refuses(kTiny + "--prompt '1 64'", {"64"});
  refuses(kTiny + "--prompt ' '", {"empty"});
  refuses(kTiny + "--prompt 1 --tokens 64", {"64", "positions"});
  refuses(kTiny + "--tokens -1", {"tokens"});
  refuses(kTiny + "--temperature -1", {"temperature"});
  refuses(kTiny + "--top-p 0", {"top-p"});
  refuses(kTiny + "--top-p 1.5", {"top-p"});
  refuses(kTiny + "--top-k -2", {"top-k"});
  refuses(kTiny + "--dtype fp8", {"fp8"});
  refuses(kTiny + "--tokenizer " + kReference + "tokenizers/gpt2.json", {"901", "64"});
  refuses(kTiny + "--tokenizer /nowhere/t.json", {"/nowhere/t.json"});
  refuses(kTiny + "--nonsense", {"nonsense"});
}

}  // namespace
}  // namespace lockstep
