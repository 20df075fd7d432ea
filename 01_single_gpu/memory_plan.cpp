// Where the memory of a training step goes: what formulas predict, and what was measured.
//
//     weights, gradients,        depend on the number of parameters and on precision alone
//     masters, moments
//     activations                grow with the micro-batch, and plain attention's with sequence^2
//     buffers                    batches and the numbers of a step
//     CUDA context               what the driver and its libraries take before the first tensor
//
//     ./lockstep run 01 memory_plan                                     the tiny model, two steps
//     ./lockstep run 01 memory_plan --model 1.7B --sequence 2048 --dry-run      no GPU needed
//
// --timeline shows one step as it happens: activations rise through forward and fall through
// backward. In the first step the pool of the GPU also takes its memory from the driver; later
// steps reuse it.

#include <CLI/CLI.hpp>
#include <cstdio>
#include <fstream>

#include "01_single_gpu/recompute.h"
#include "08_kernels/use_matmul.h"
#include "common/feed.h"
#include "common/memory_model.h"
#include "common/plan.h"
#include "common/svg.h"

using namespace lockstep;

struct Pictures {
  std::string csv, bars, timeline;
};

struct Row {
  std::string category, source;  // the source's figure, where it has one
  int64_t predicted = -1, measured = -1;
};

static std::string mebibytes(int64_t bytes) {
  char out[32];
  std::snprintf(out, sizeof out, "%.2f", double(bytes) / (1 << 20));
  return bytes < 0 ? "" : out;
}

static std::vector<Row> predict(const Options& o) {
  const ModelConfig& c = o.config;
  int64_t n = c.parameters();
  ModelMemory m = model_memory(n, o.compute, o.gradients);
  ActivationMemory a = activation_memory(c, {o.micro_batch, o.sequence}, o.compute, o.recompute);
  double source =
      source_activation_bytes(double(c.layers), double(o.sequence), double(o.micro_batch),
                              double(c.hidden), double(c.heads), o.recompute);
  bool narrow = o.compute == DType::BF16;
  return {{"weights", narrow ? "2N" : "4N", m.weights},
          {"gradients", o.gradients == DType::BF16 ? "2N" : "4N", m.gradients},
          {"master weights", narrow ? "4N" : "none", m.master},
          {"moments", "8N", m.moments},
          {"activations kept", mebibytes(int64_t(source)) + " (16 bit)", a.stored},
          {"activations peak", "", a.peak},
          {"buffers", ""},
          {"CUDA context", o.device == Device::CUDA ? "1-2 GB" : "none"}};
}

// What happened to the account, as a line to draw.
class Timeline {
 public:
  explicit Timeline(MemoryAccount& account)
      : account_(account), values_(MemoryAccount::kCategories) {
    account_.on_change = [this] { sample(); };
  }
  ~Timeline() { account_.on_change = {}; }
  void mark(const std::string& what) { marks_.push_back({double(x_.size()), what}); }
  svg::Lines picture(const std::string& title) const {
    svg::Lines lines{title, "allocations and releases", "MiB", {}, x_, values_, true, marks_};
    for (size_t c = 0; c < values_.size(); ++c) lines.lines.push_back(name_of(Category(c)));
    return lines;
  }

 private:
  void sample() {
    x_.push_back(double(x_.size()));
    for (size_t c = 0; c < values_.size(); ++c)
      values_[c].push_back(double(account_.now(Category(c))) / (1 << 20));
  }
  MemoryAccount& account_;
  std::vector<double> x_;
  std::vector<std::vector<double>> values_;
  std::vector<svg::Lines::Mark> marks_;
};

// Two steps, the first with everything that happens only once.
static void measure(const Options& o, const Corpus& corpus, std::vector<Row>& rows,
                    const std::string& picture) {
  MemoryAccount& account = *memory_account();
  int64_t context = device::used_bytes();  // made by the question; others on the GPU count as well
  Timeline timeline(account);
  timeline.mark("allocate");
  Parts parts = plain_parts();
  use_recomputation(parts, o.recompute);
  Stage model(o.config, parts, o.compute, o.device);
  DataParallel parallel({&model}, {.gradients = o.gradients});
  parallel.allocate();
  start_weights({&model}, parallel.owned(), o);
  Feed feed(corpus, o);
  AdamW optimizer(parallel.owned(), update_rule(o, feed.steps()), o.device);
  Tensor one = Tensor::empty({1}, sum_type(o.compute), o.device, Category::Buffers);
  on(one).fill(one, 1);

  int64_t kept = 0, buffers = 0;
  for (int64_t step = 0; step < 2; ++step) {
    account.reset_peaks();
    timeline.mark(text("step ", step + 1, ": forward"));
    StepBatch batch = feed.step(step);
    parallel.begin_step(int64_t(batch.micro_batches.size()));
    optimizer.begin_step(batch.valid);
    Tape tape;
    const MicroBatch& micro_batch = batch.micro_batches[0];
    Var loss = model.loss(tape, model.forward(tape, micro_batch), micro_batch, optimizer.scale());
    kept = account.now(Category::Activations);
    timeline.mark("backward");
    tape.backward(loss, one);
    timeline.mark("optimizer");
    optimizer.step();
    buffers = account.peak(Category::Buffers);
    device::synchronize();
    if (o.device == Device::CUDA)
      std::printf("after step %d the GPU has given out %s MiB\n", int(step + 1),
                  mebibytes(device::used_bytes() - context).c_str());
  }
  for (Row& row : rows) {
    for (Category c : {Category::Weights, Category::Gradients, Category::Master, Category::Moments})
      if (row.category == name_of(c)) row.measured = account.now(c);
    if (row.category == "activations kept") row.measured = kept;
    if (row.category == "activations peak") row.measured = account.peak(Category::Activations);
    if (row.category == "buffers") row.measured = buffers;
    if (row.category == "CUDA context" && o.device == Device::CUDA) row.measured = context;
  }
  if (!picture.empty()) svg::save(picture, svg::draw(timeline.picture("Memory of two steps")));
}

static void show(const std::vector<Row>& rows, const Pictures& files) {
  std::printf("%-18s %22s %16s %16s %8s\n", "MiB", "the source", "predicted", "measured", "ratio");
  for (const Row& r : rows) {
    std::string ratio = "";
    if (r.predicted > 0 && r.measured >= 0) {
      char out[16];
      std::snprintf(out, sizeof out, "%.3f", double(r.measured) / double(r.predicted));
      ratio = out;
    }
    std::printf("%-18s %22s %16s %16s %8s\n", r.category.c_str(), r.source.c_str(),
                mebibytes(r.predicted).c_str(), mebibytes(r.measured).c_str(), ratio.c_str());
  }
  if (!files.csv.empty()) {
    std::ofstream csv(files.csv);
    csv << "category,source,predicted_bytes,measured_bytes\n";
    for (const Row& r : rows)
      csv << r.category << "," << r.source << "," << r.predicted << "," << r.measured << "\n";
    csv.close();
    require(csv.good(), "--csv ", files.csv, " cannot be written");
  }
  if (files.bars.empty()) return;
  svg::Bars bars{"Memory of a training step", "MiB", {"predicted", "measured"}, {}, {{}, {}}};
  for (const Row& r : rows) {
    if (r.category == "activations kept") continue;  // part of the peak
    bars.parts.push_back(r.category);
    bars.values[0].push_back(double(std::max<int64_t>(0, r.predicted)) / (1 << 20));
    bars.values[1].push_back(double(std::max<int64_t>(0, r.measured)) / (1 << 20));
  }
  svg::save(files.bars, svg::draw(bars));
}

int main(int argc, char** argv) {
  return run_main(argc, argv, [](int argc, char** argv) {
    Pictures files;
    auto flags = [&](CLI::App& app) {
      output_file(app.add_option("--csv", files.csv, "write the table to this file"));
      output_file(app.add_option("--svg", files.bars, "draw it as bars"));
      output_file(app.add_option("--timeline", files.timeline,
                                 "draw the memory of two steps as it changes"));
    };
    auto options = parse_options(argc, argv, "Predicts and measures the memory of a step.", flags);
    if (!options) return 0;
    use_own_matmul(*options);  // --matmul ladder
    Corpus corpus = open_corpus(*options);
    std::vector<Row> rows = predict(*options);
    if (!options->dry_run) measure(*options, corpus, rows, files.timeline);
    show(rows, files);
    return 0;
  });
}
