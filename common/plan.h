#pragma once
// Before and around a run: what will happen, with which weights it starts, what came out.

#include "common/corpus.h"
#include "common/feed.h"
#include "common/optim.h"
#include "common/options.h"

namespace lockstep {

// Opens the text, and settles the vocabulary of a model that takes it from its data.
Corpus open_corpus(Options& options);

// What will run: model, batch, data, device, memory. All that --dry-run does.
void print_plan(const Options& options, const Corpus& corpus);

// Weights from --hf, or from the seed.
void start_weights(const std::vector<Owned>& owned, const Options& options);

// The options' rule, with the schedule ending at the last step.
UpdateRule update_rule(const Options& options, int64_t steps);

void show_sample(Stage& model, const Corpus& corpus, const Options& options);

}  // namespace lockstep
