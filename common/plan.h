#pragma once
// Before and around a run: what will happen, with which weights it starts, what came out.

#include "common/corpus.h"
#include "common/feed.h"
#include "common/memory_model.h"
#include "common/mesh.h"
#include "common/optim.h"
#include "common/options.h"

namespace lockstep {

// Opens the text, and settles the vocabulary of a model that takes it from its data.
Corpus open_corpus(Options& options);

// The first thing that every rank of a parallel program does: the batch is settled for the ranks
// that share it, and all take rank 0's seed. First weights, dropout and the order of the data
// follow from the seed, so ranks with seeds of their own would train different models on the same
// samples, and the loss would fall all the same.
void settle_ranks(Options& options, ProcessMesh& mesh);

// What will run: model, batch, data, device, memory of each rank. All that --dry-run does.
void print_plan(const Options& options, const Corpus& corpus);
void print_plan(const Options& options, const Corpus& corpus, const ModelMemory& each);

// Weights from --hf, or from the seed. `chunks`: of which `owned` is this rank's part. Of the ranks
// of `data`, the first one reads the files, and the others get what it has read.
void start_weights(const std::vector<Stage*>& chunks, const std::vector<Owned>& owned,
                   const Options& options, Communicator* data = nullptr);

// The options' rule, with the schedule ending at the last step.
UpdateRule update_rule(const Options& options, int64_t steps);

// All ranks write it, because all hold a part of the model; one of them prints.
// tp: of ranks that have a part of the vocabulary each.
void show_sample(Stage& model, const Corpus& corpus, const Options& options, bool speaks = true,
                 Communicator* tp = nullptr);

}  // namespace lockstep
