#include "common/checks.h"

#include <CLI/CLI.hpp>
#include <cmath>
#include <cstdio>
#include <unordered_map>
#include <utility>

#include "common/checkpoint_reader.h"
#include "common/feed.h"
#include "common/plan.h"

namespace lockstep {

void add_check_flags(CLI::App& app, CheckFlags& flags) {
  app.add_flag("--check-replicas", flags.replicas,
               "after each step, compare all ranks' copies of the weights");
  app.add_flag("--check", flags.reference,
               "train on one rank beside it for the first steps, and compare");
}

// ---- Replicas

static int64_t hash_of(const Tensor& t) {
  Tensor host = t.to(Device::CPU, Category::Buffers);
  device::synchronize();
  ContentHash hash;
  hash.add({reinterpret_cast<const char*>(host.raw()), size_t(host.bytes())});
  return int64_t(hash.value());
}

// Do all ranks of a group have the same hashes of these parameters?
static void compare(Communicator& group, const Weights& parameters,
                    const std::vector<int64_t>& mine, Device device, int64_t step) {
  const size_t n = mine.size();
  Tensor hashes = Tensor::from(mine, {int64_t(n)}, device, Category::Buffers);
  Tensor all = Tensor::empty({group.size() * hashes.size()}, DType::I64, device, Category::Buffers);
  group.all_gather(hashes, all).wait();
  const std::vector<int64_t> values = all.values<int64_t>();
  for (size_t r = 0; r < size_t(group.size()); ++r)
    for (size_t i = 0; i < n; ++i)
      require(values[r * n + i] == values[i], "after step ", step, " rank ", r, "'s copy of ",
              parameters[i]->name, " differs from rank 0's (in \"", group.name(),
              "\"): the ranks no longer train one model");
}

void check_replicas(const std::vector<Stage*>& chunks, DataParallel& parallel, ProcessMesh& mesh,
                    int64_t step) {
  std::vector<std::pair<Parameter*, int64_t>> hashes;
  for (Stage* stage : chunks)
    for (Unit* unit : stage->units()) {
      parallel.acquire(*unit, DataParallel::Pass::Evaluation);
      for (const Weights& group : unit->groups)
        for (Parameter* p : group) hashes.push_back({p, hash_of(p->value)});
      parallel.release(*unit, DataParallel::Pass::Evaluation);
    }
  for (Axis axis : {Axis::Data, Axis::TP, Axis::KvCopies, Axis::Ends}) {
    Weights parameters;
    std::vector<int64_t> mine;
    for (auto& [p, hash] : hashes)
      if (p->replicas.has(axis)) parameters.push_back(p), mine.push_back(hash);
    if (mesh.group(axis).size() > 1 && !mine.empty())
      compare(mesh.group(axis), parameters, mine, chunks[0]->device(), step);
  }
}

// ---- Reference

namespace {

// While it lives, the calling thread's memory is on other books.
class OtherBooks {
 public:
  explicit OtherBooks(std::shared_ptr<MemoryAccount> books)
      : before_(std::exchange(memory_account(), std::move(books))) {}
  ~OtherBooks() { memory_account() = before_; }

 private:
  std::shared_ptr<MemoryAccount> before_;
};

std::vector<double> doubles(const Tensor& t) {
  Tensor host = t.to(Device::CPU, Category::Buffers);
  device::synchronize();
  Tensor wide = Tensor::empty(t.shape(), DType::F64, Device::CPU, Category::Buffers);
  on(wide).cast(wide, host);
  return wide.values<double>();
}

double mean_square(const std::vector<double>& values) {
  double sum = 0;
  for (double x : values) sum += x * x;
  return values.empty() ? 0 : sum / double(values.size());
}

// How far a piece is from the elements of the whole that it stands for, as a share of the whole:
// root mean squares. (A single element may be far off, where AdamW takes a tiny gradient's sign.)
double difference(const Tensor& piece, const Tensor& whole, const Owned& o) {
  std::vector<double> mine = doubles(piece), all = doubles(whole), off;
  IndexMap map = o.parameter->shard.index_map();
  for (size_t i = 0; i < mine.size(); ++i)
    off.push_back(mine[i] - all[size_t(map.whole(o.first + int64_t(i)))]);
  double most = mean_square(off);
  return most == 0 ? 0 : std::sqrt(most / mean_square(all));
}

double relative(double a, double b) { return a == b ? 0 : std::abs(a - b) / std::abs(b); }

}  // namespace

struct Reference::Run {
  Run(const Options& o, const Corpus& corpus, const UpdateRule& rule)
      : options(alone(o)),
        parts(with_seed(o.seed)),
        model(o.config, parts, o.compute, o.device),
        parallel({&model}, {.gradients = o.gradients}),
        feed(corpus, options) {
    parallel.allocate();
    start_weights({&model}, parallel.owned(), options);
    optimizer = std::make_unique<AdamW>(parallel.owned(), rule, o.device);
    one = Tensor::empty({1}, sum_type(o.compute), o.device, Category::Buffers);
    on(one).fill(one, 1);
    for (const Owned& owned : parallel.owned()) owned_of[owned.parameter->name] = &owned;
  }
  static Options alone(Options o) {
    settle_batch(o, 1);
    return o;
  }
  static Parts with_seed(uint64_t seed) {
    Parts parts = plain_parts();
    parts.seed = seed;
    return parts;
  }
  void step(int64_t index) {
    StepBatch batch = feed.step(index);
    parallel.begin_step(int64_t(batch.micro_batches.size()));
    optimizer->begin_step(batch.valid);
    for (const MicroBatch& micro_batch : batch.micro_batches) {
      Tape tape;
      Var hidden = model.forward(tape, micro_batch);
      Var loss = model.loss(tape, hidden, micro_batch, optimizer->scale());
      optimizer->add_loss(loss.value);
      tape.backward(loss, one);
    }
    optimizer->step();
  }

  Options options;
  Parts parts;
  Stage model;
  DataParallel parallel;
  Feed feed;
  std::unique_ptr<AdamW> optimizer;
  Tensor one;
  std::unordered_map<std::string, const Owned*> owned_of;
};

Reference::Reference(const Options& options, const Corpus& corpus, const UpdateRule& rule)
    : books_(std::make_shared<MemoryAccount>()) {
  OtherBooks open(books_);
  run_ = std::make_unique<Run>(options, corpus, rule);
  // Sums in another order. Gradients differ in a few last bits at first, and then also because the
  // weights do: AdamW takes as large a step for a tiny gradient as for a large one.
  bool wide = options.compute != DType::BF16;
  allowed_ = wide ? Differences{1e-5, 1e-3, 2e-2, 1e-3} : Differences{1e-2, 1e-1, 2e-1, 1e-1};
}

Reference::~Reference() = default;

void Reference::step(int64_t step, const AdamW& parallel) {
  OtherBooks open(books_);
  run_->step(step - 1);
  auto compare = [&](double found, double& most, double allowed, const std::string& what) {
    most = std::max(most, found);
    require(found <= allowed, "step ", step, ": ", what, " differs from one rank's by ", found,
            ", more than the ", allowed, " that rounding explains");
  };
  StepState one = on_host(run_->optimizer->state()), many = on_host(parallel.state());
  compare(relative(many.loss, one.loss), largest_.loss, allowed_.loss,
          text("the loss, ", many.loss, " instead of ", one.loss, ","));
  compare(relative(many.gradient_norm, one.gradient_norm), largest_.norm, allowed_.norm,
          text("the gradient norm, ", many.gradient_norm, " instead of ", one.gradient_norm, ","));
  for (const Owned& o : parallel.owned()) {
    const Owned& whole = *run_->owned_of.at(o.parameter->name);
    compare(difference(o.grad, whole.grad, o), largest_.gradient, allowed_.gradient,
            text("the gradient of ", o.parameter->name));
    compare(difference(o.master, whole.master, o), largest_.weight, allowed_.weight,
            o.parameter->name);
  }
}

// ---- Both

Checks::Checks(const CheckFlags& flags, const std::vector<Stage*>& chunks, DataParallel& parallel,
               ProcessMesh& mesh, const Options& options, const Corpus& corpus,
               const AdamW& optimizer)
    : flags_(flags),
      chunks_(chunks),
      parallel_(parallel),
      mesh_(mesh),
      optimizer_(optimizer),
      last_(std::min(kSteps, optimizer.rule().schedule.total)) {
  require(!flags.reference || !options.resume,
          "--check compares a run from its first step on: leave out --resume");
  if (flags_.replicas) check_replicas(chunks_, parallel_, mesh_, 0);
  if (flags_.reference) reference_ = std::make_unique<Reference>(options, corpus, optimizer.rule());
}

void Checks::step(int64_t step) {
  if (flags_.replicas) check_replicas(chunks_, parallel_, mesh_, step);
  if (!reference_) return;
  reference_->step(step, optimizer_);
  if (step == last_) conclude(step);
}

void Checks::conclude(int64_t steps) {
  const Reference::Differences& mine = reference_->largest();
  Tensor most = Tensor::from<double>({mine.loss, mine.norm, mine.gradient, mine.weight}, {4},
                                     chunks_[0]->device(), Category::Buffers);
  mesh_.world().all_reduce(most, ReduceOp::Max).wait();
  std::vector<double> d = most.values<double>();
  reference_.reset();
  if (mesh_.world().rank() != 0) return;
  std::printf(
      "check   %lld steps are those of one rank: loss within %.0e, gradient norm %.0e, gradients "
      "%.0e, weights %.0e\n",
      static_cast<long long>(steps), d[0], d[1], d[2], d[3]);
  std::fflush(stdout);
}

}  // namespace lockstep
