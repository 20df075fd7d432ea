#pragma once
// What a pipeline must do in every layout: the checks that the selection of every day
// (pipeline_test.cpp) and all combinations (pipeline_matrix_test.cpp) share.

#include <thread>

#include "01_single_gpu/recompute.h"
#include "tests/pipeline_rig.h"
#include "tests/temporary.h"

namespace lockstep {

inline constexpr int kPipelines[] = {2, 4, 8};
inline constexpr int kMicroBatches[] = {1, 2, 3, 4, 8, 16};

// Runs without a pipeline, each computed once.
class PipelineReferences {
 public:
  // Gradients of a pipeline are those of the same data parallelism without one, bit by bit. Only a
  // tied table's two gradients may be added up in another order. false: refused, with the rule.
  bool expect_same(const PipelineCase& c, bool tied) {
    SCOPED_TRACE(c.name() + (tied ? ", tied" : ""));
    if (!c.allowed()) {
      std::string rule = c.schedule == "interleaved"
                             ? text("groups of ", c.pp, ": a group has at least as many")
                             : text("at least ", 2 * c.pp, " micro-batches, not ", c.micro_batches);
      expect_refusal([&] { c.make(c.micro_batches); }, {text(c.pp, " ranks"), rule});
      return false;
    }
    LayoutRig::Settings s = pipeline_settings(tied);
    Trained run = train_pipeline(c, s);
    const Trained& plain = of(c.dp, c.micro_batches, tied);
    // AdamW makes large steps of small gradients, and differences of rounding with them.
    lockstep::expect_same(run, of(1, 1, tied), {.weight = 1e-5});
    for (const auto& [name, g] : plain.gradients) {
      if (tied && name == "model.embed_tokens.weight") continue;
      EXPECT_TRUE(bitwise(run.gradients.at(name), g)) << name;
    }
    EXPECT_EQ(strict_order(run.ledgers), "");
    return true;
  }
  const Trained& of(int dp, int micro_batches, bool tied) {
    auto [at, fresh] = runs_.try_emplace({dp, micro_batches, tied});
    if (fresh) at->second = train_plain(dp, micro_batches, pipeline_settings(tied));
    return at->second;
  }

 private:
  std::map<std::tuple<int, int, bool>, Trained> runs_;
};

// The step again and again, with another rank late at another action each time.
inline void expect_patience(const PipelineCase& c, double seconds) {
  Schedule schedule = c.make(c.micro_batches).schedule;
  Tensors undisturbed = train_pipeline(c, pipeline_settings()).gradients;
  run_threads(c.pp, Device::CPU, {.time_limit = 20}, [&](Communicator& world) {
    ProcessMesh mesh(world, {.pp = c.pp});
    PipelineRig rig(pipeline_settings(), c, mesh);
    std::vector<MicroBatch> batches = flowing(deep_config(), {}, c.micro_batches);
    for (int late = 0; late < c.pp; ++late)
      for (size_t when = 0; when < schedule[size_t(late)].size(); ++when) {
        size_t action = 0;
        rig.gradients(batches, [&](const Action&, bool begins) {
          if (begins && action++ == when && world.rank() == late)
            std::this_thread::sleep_for(std::chrono::duration<double>(seconds));
        });
        EXPECT_EQ(action, schedule[size_t(world.rank())].size());
        for (const Owned& o : rig.parallel->owned())
          EXPECT_TRUE(bitwise(doubles(o.grad), undisturbed.at(o.parameter->name)))
              << "rank " << late << " late at its action " << when << ": " << o.parameter->name;
      }
  });
}

}  // namespace lockstep
