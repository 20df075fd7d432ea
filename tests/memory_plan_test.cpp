// The memory planner and the timeline of a step.

#include <gtest/gtest.h>
#include <sys/wait.h>

#include <cstdio>
#include <sstream>

#include "common/svg.h"
#include "tests/rig.h"
#include "tests/temporary.h"

namespace lockstep {
namespace {

std::string output_of(const std::string& command, int* status = nullptr) {
  FILE* pipe = popen((command + " 2>&1").c_str(), "r");
  std::string out;
  char buffer[4096];
  while (size_t n = fread(buffer, 1, sizeof buffer, pipe)) out.append(buffer, n);
  int code = pclose(pipe);
  if (status) *status = WIFEXITED(code) ? WEXITSTATUS(code) : -1;
  return out;
}

const std::string kPlan = LOCKSTEP_BINARY_DIR "/01_single_gpu/memory_plan";

// The line of the table that begins with `category`, as words.
std::vector<std::string> row(const std::string& out, const std::string& category) {
  std::istringstream lines(out);
  for (std::string line; std::getline(lines, line);) {
    if (line.rfind(category, 0) != 0) continue;
    std::istringstream words(line.substr(category.size()));
    return {std::istream_iterator<std::string>(words), {}};
  }
  return {};
}

TEST(MemoryPlan, S8_CalculatorNeedsNoGpu) {
  int status = -1;
  std::string out = output_of(
      kPlan + " --device cpu --model 1.7B --sequence 2048 --micro-batch 8 --dtype bf16 --dry-run",
      &status);
  EXPECT_EQ(status, 0) << out;
  EXPECT_EQ(row(out, "weights"), (std::vector<std::string>{"2N", "3456.19"}));  // 2 N / 2^20
  EXPECT_EQ(row(out, "moments"), (std::vector<std::string>{"8N", "13824.77"}));
  ASSERT_GE(row(out, "activations kept").size(), 4u) << out;
}

TEST(MemoryPlan, MeasuredIsPredicted) {
  TemporaryFolder dir;
  for (const char* kind : {"none", "selective", "full"}) {
    std::string files = " --csv " + (dir / "a.csv").string() + " --svg " +
                        (dir / "a.svg").string() + " --timeline " + (dir / "t.svg").string();
    std::string out = output_of(kPlan + " --device cpu --layers 2 --sequence 64 --micro-batch 2" +
                                " --recompute " + kind + files);
    for (const char* category : {"weights", "gradients", "moments", "activations kept"})
      EXPECT_EQ(row(out, category).back(), "1.000") << category << "\n" << out;
    EXPECT_NEAR(std::stod(row(out, "activations peak").back()), 1, 0.05) << out;
    EXPECT_NE(content_of(dir / "a.csv").find("moments,8N,"), std::string::npos);
    EXPECT_NE(content_of(dir / "a.svg").find("</svg>"), std::string::npos);
    EXPECT_NE(content_of(dir / "t.svg").find("step 2: forward"), std::string::npos);
  }
}

TEST(MemoryPlan, S6_CudaContextIsACategoryOfItsOwn) {
  std::string flags = " --layers 2 --sequence 64 --micro-batch 2";
  EXPECT_EQ(row(output_of(kPlan + " --device cpu" + flags), "CUDA context"),
            (std::vector<std::string>{"none"}));
  if (!device::available()) return;
  std::vector<std::string> words = row(output_of(kPlan + " --device cuda" + flags), "CUDA context");
  ASSERT_EQ(words.size(), 3u);  // "1-2", "GB", what was measured
  double mebibytes = std::stod(words[2]);
  EXPECT_GT(mebibytes, 100);
  EXPECT_LT(mebibytes, 3000);
}

// Activations rise through forward and fall through backward, to nothing; what the model owns stays
// as it is. Here gradients and moments have their memory before the first step; a framework that
// makes them on first use shows them growing in the first step.
TEST(MemoryPlan, S7_ActivationsRiseInForwardAndFallInBackward) {
  Rig::Settings s;
  s.config.layers = 6;
  Rig rig(s);
  MemoryAccount& account = *memory_account();
  MicroBatch batch = random_batch(2, 16, s.config.vocab, 1);
  int64_t owned[] = {account.now(Category::Weights), account.now(Category::Gradients),
                     account.now(Category::Moments)};
  int64_t before = account.now(Category::Activations);
  Tape tape;
  rig.parallel.begin_step(1);
  rig.optimizer->begin_step(rig.valid({batch}));
  // marks see the account on the way back, around reaches it on the way there
  Parts parts = plain_parts();
  std::vector<int64_t> forward, backward;
  parts.around = [&](Tape& t, const Var& x, Unit& unit, const Body& body) {
    if (unit.kind == Unit::Block)
      t.mark("meter", [&] { backward.push_back(account.now(Category::Activations) - before); });
    Var out = body(t, x);
    if (unit.kind == Unit::Block) forward.push_back(account.now(Category::Activations) - before);
    return out;
  };
  Stage metered(s.config, parts, s.compute, s.device);
  DataParallel parallel({&metered}, {});
  parallel.allocate();
  initialise(parallel.owned(), 1);
  owned[0] = account.now(Category::Weights), owned[1] = account.now(Category::Gradients);
  Var loss = metered.loss(tape, metered.forward(tape, batch), batch, rig.optimizer->scale());
  tape.backward(std::exchange(loss, {}), rig.one);
  ASSERT_EQ(forward.size(), 6u);
  ASSERT_EQ(backward.size(), 6u);
  for (size_t i = 1; i < 6; ++i) {
    EXPECT_GT(forward[i], forward[i - 1]);
    EXPECT_EQ(forward[i] - forward[i - 1], forward[1] - forward[0]);  // every block keeps the same
    EXPECT_LT(backward[i], backward[i - 1]);
  }
  EXPECT_EQ(account.now(Category::Activations), before);
  EXPECT_EQ(account.now(Category::Weights), owned[0]);
  EXPECT_EQ(account.now(Category::Gradients), owned[1]);
  EXPECT_EQ(account.now(Category::Moments), owned[2]);
}

TEST(MemoryPlan, Pitfall13_OneRankTakesSixteenBytesPerParameter) {
  auto account = std::make_shared<MemoryAccount>();
  std::swap(memory_account(), account);
  Rig::Settings s;
  s.config.hidden = 128, s.config.head_dim = 32, s.config.ffn = 256, s.config.layers = 7;
  s.compute = s.gradients = DType::BF16;
  {
    Rig rig(s);
    int64_t n = s.config.parameters();
    EXPECT_GT(n, 1000000);
    int64_t model = 0;
    for (Category c : {Category::Weights, Category::Gradients, Category::Master, Category::Moments})
      model += memory_account()->now(c);
    EXPECT_EQ(model, 16 * n);
    EXPECT_EQ(memory_account()->now(), model + memory_account()->now(Category::Buffers));
  }
  std::swap(memory_account(), account);
}

TEST(Svg, DrawsEveryBarAndLine) {
  std::string bars = svg::draw(svg::Bars{"t", "MiB", {"a", "b<c"}, {"p", "q"}, {{1, 2}, {3, 4}}});
  EXPECT_NE(bars.find("b&lt;c"), std::string::npos);
  auto count = [](const std::string& in, const std::string& what) {
    size_t n = 0;
    for (size_t at = in.find(what); at != std::string::npos; at = in.find(what, at + 1)) ++n;
    return n;
  };
  EXPECT_EQ(count(bars, "<rect"), 1u + 2u + 4u);  // background, legend, parts
  svg::Lines lines{"t",   "x",          "s", {"p", "q"}, {0, 1, 2}, {{1, 2, 3}, {3, 2, 1}},
                   false, {{1, "here"}}};
  EXPECT_EQ(count(svg::draw(lines), "<polyline"), 2u);
  lines.stacked = true;
  EXPECT_EQ(count(svg::draw(lines), "<polygon"), 2u);
  EXPECT_NE(svg::draw(lines).find("here"), std::string::npos);
  EXPECT_THROW(svg::save("/nowhere/at/all.svg", "x"), Error);
}

}  // namespace
}  // namespace lockstep
