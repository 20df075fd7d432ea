// Training with a pipeline: which samples its stages read, and what of a run another pipeline can
// go on from.

#include "01_single_gpu/recompute.h"
#include "common/plan.h"
#include "common/training.h"
#include "tests/checkpoints.h"
#include "tests/pipeline_rig.h"

namespace lockstep {
namespace {

// 06's training loop; `see` is shown each step's micro-batches.
class Watched : public Training {
 public:
  using See = std::function<void(const std::vector<MicroBatch>&)>;
  Watched(const Job& job, PipelineRig& rig, See see) : Training(job), rig_(rig), see_(see) {}
  const AdamW& optimizer() const { return optimizer_; }

 protected:
  void forward_backward(const StepBatch& batch, Span&) override {
    if (see_) see_(batch.micro_batches);
    rig_.pipeline->run(batch.micro_batches, optimizer_.scale(), one_,
                       [this](const Tensor& loss) { optimizer_.add_loss(loss); });
  }
  double validation_loss() override { return 0; }
  void show_sample() override {}

 private:
  PipelineRig& rig_;
  See see_;
};

struct State {
  Tensors weights, m, v;
  bool operator==(const State&) const = default;
};

Options options_of(const std::string& checkpoint) {
  Options o;
  o.config = deep_config();
  o.config.vocab = 256;
  o.config.tied = true;
  o.sequence = 8;
  o.micro_batch = 2;
  o.batch_tokens = 8 * 16;
  o.steps = 6;
  o.seed = 3;
  o.evaluate_every = 0;
  o.checkpoint = checkpoint;
  return o;
}

State train(const Corpus& corpus, Options options, const PipelineCase& c,
            const std::function<void(ProcessMesh&, const std::vector<MicroBatch>&)>& see = {}) {
  Whole weights, m, v;
  ::testing::internal::CaptureStdout();
  run_threads(c.ranks(), Device::CPU, {.time_limit = 20}, [&](Communicator& world) {
    ProcessMesh mesh(world, {.dp = c.dp, .pp = c.pp});
    Options mine = options;
    settle_ranks(mine, mesh);
    LayoutRig::Settings s;
    s.config = mine.config;
    PipelineRig rig(s, c, mesh);
    for (Stage* stage : rig.chunks)  // what the rig has published
      for (Unit* unit : stage->units())
        rig.parallel->acquire(*unit, DataParallel::Pass::Evaluation);
    Watched training({mesh, mine, corpus, rig.chunks, *rig.parallel, {.replicas = true}}, rig,
                     [&](const std::vector<MicroBatch>& batches) {
                       if (see) see(mesh, batches);
                     });
    training.run();
    std::vector<Owned> owned = training.optimizer().owned();
    weights.add(owned, &Owned::master);
    const auto& moments = training.optimizer().moments();
    for (size_t i = 0; i < owned.size(); ++i) owned[i].master = moments[i].m;
    m.add(owned, &Owned::master);
    for (size_t i = 0; i < owned.size(); ++i) owned[i].master = moments[i].v;
    v.add(owned, &Owned::master);
  });
  ::testing::internal::GetCapturedStdout();
  return {weights.get(), m.get(), v.get()};
}

struct Text {
  Text() {
    std::string content;
    for (int i = 0; i < 4000; ++i) content += char('a' + i * i % 23);
    file = dir.write("text.txt", content);
  }
  Corpus corpus() const { return Corpus({file, 8}); }
  TemporaryFolder dir;
  std::string file;
};

TEST(PipelineTraining, Pitfall50_StagesOfOnePipelineReadTheSameSamples) {
  Text text_file;
  Corpus corpus = text_file.corpus();
  for (const char* schedule : {"1f1b", "zb-v"}) {
    std::mutex mutex;
    std::map<std::pair<int, int>, std::string> read;  // by dp, pp: inputs, labels and sample ids
    train(corpus, options_of(""), {schedule, 2, 4, 2},
          [&](ProcessMesh& mesh, const std::vector<MicroBatch>& batches) {
            EXPECT_EQ(batches.size(), 4u);
            std::lock_guard lock(mutex);
            for (const MicroBatch& b : batches)
              read[{mesh.here().dp, mesh.here().pp}] +=
                  bytes_of(b.inputs) + bytes_of(b.targets) + bytes_of(b.rows);
          });
    ASSERT_EQ(read.size(), 4u);
    for (int dp : {0, 1}) EXPECT_EQ((read[{dp, 0}]), (read[{dp, 1}])) << dp;
    EXPECT_NE((read[{0, 0}]), (read[{1, 0}]));
  }
}

// The first pipeline stops after 3 of 6 steps; each of the others goes on.
TEST(PipelineTraining, CheckpointOfTwoStagesLoadsOnOneAndFour) {
  Text text_file;
  Corpus corpus = text_file.corpus();
  for (Sync sync : {Sync::Bucketed, Sync::Zero1}) {
    Options options = options_of(text_file.dir / name_of(sync));
    options.stop_after = 3;
    PipelineCase first{"1f1b", 2, 4, 2, sync};
    State saved = train(corpus, options, first);
    options.resume = true;
    for (const PipelineCase& c : {PipelineCase{"afab", 1, 4, 2},
                                  {"zb-h1", 4, 4, 2, Sync::Zero1},
                                  {"zb-v", 4, 8},
                                  {"interleaved", 2, 4, 2, Sync::Zero1}}) {
      SCOPED_TRACE(c.name());
      EXPECT_EQ(train(corpus, options, c), saved);  // every step is done: it loads, and stops
    }
    // And goes on as the first one would have: to the last bit with as many ranks on the data axis.
    Options whole = options_of("");
    State all = train(corpus, whole, {"1f1b", 2, 4, 2, sync});
    options.stop_after = 0;
    options.checkpoint_every = 100;
    State resumed = train(corpus, options, {"zb-h1", 4, 4, 2, sync});
    for (const auto& [name, w] : all.weights)
      EXPECT_TRUE(bitwise(resumed.weights.at(name), w)) << name;
  }
}

}  // namespace
}  // namespace lockstep
