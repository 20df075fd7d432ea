#pragma once
// Runs any schedule. A rank walks through the rounds of its plan (plan.h): it computes one action,
// then exchanges what this round is to exchange, and looks at nothing else.
//
//   F   input (received, or tokens)   ─▶ chunk's forward  ─▶ output, to the next stage, or loss
//   I   gradient of that output       ─▶ tape, inputs     ─▶ gradient of the input, to the stage
//   before W                                    tape, weights        (B: both at once)
//
// Each micro-batch in flight has a tape of its own in each chunk; the tape holds its activations
// from F to its last backward action, so the memory accounts show what a schedule costs.
//
// A message is launched when its sender has computed it, and waited for when its receiver needs it;
// what a rank receives, it receives while it computes the action before. Rounds, and within a round
// the senders' numbers, put all messages of the job in one order, so that none can wait for another
// in a circle. Each travels alone: in a group, a message to a rank that is ready would wait for the
// one to a rank that is not.

#include <deque>
#include <map>
#include <optional>

#include "06_pipeline_parallel/plan.h"
#include "common/comm.h"
#include "common/model.h"

namespace lockstep {

class Pipeline {
 public:
  // The schedule may depend on the number of micro-batches, and a run's last step may have fewer.
  using MakeSchedule = std::function<Schedule(int micro_batches)>;
  struct Settings {
    Placement placement;
    MakeSchedule schedule;
    Cut stream_rows = {};  // as in Parts
  };
  // What the program wants to know of an action that was run.
  using Observer = std::function<void(const Action&, bool begins)>;

  Pipeline(std::vector<Stage*> chunks, Communicator& pp, Settings settings)
      : chunks_(std::move(chunks)), pp_(pp), settings_(std::move(settings)) {
    const Placement& placement = settings_.placement;
    require(placement.ranks == pp.size() && placement.chunks == int(chunks_.size()),
            "a schedule for ", placement.ranks, " ranks with ", placement.chunks,
            " chunks each, and there are ", pp.size(), " with ", chunks_.size());
    pp.connect();
  }

  // Forward and backward of all micro-batches. add_loss is called with each one's loss on the rank
  // that has the last stage. one [1]: the gradient of the loss.
  void run(const std::vector<MicroBatch>& batches, const Tensor& scale, const Tensor& one,
           const std::function<void(const Tensor& loss)>& add_loss, const Observer& observer = {}) {
    batches_ = &batches, scale_ = scale, one_ = one, add_loss_ = add_loss;
    int m = int(batches.size());
    auto [at, fresh] = plans_.try_emplace(m);
    if (fresh) at->second = plan(settings_.schedule(m), settings_.placement)[size_t(pp_.rank())];
    walk(at->second, Tape::Mode::Record, observer);
  }

  // Forward only: what evaluation needs.
  void evaluate(const std::vector<MicroBatch>& batches, const Tensor& scale,
                const std::function<void(const Tensor& loss)>& add_loss) {
    batches_ = &batches, scale_ = scale, add_loss_ = add_loss;
    Schedule forward(size_t(pp_.size()));
    for (auto& actions : forward)
      for (int c = 0; c < int(chunks_.size()); ++c)
        for (int i = 0; i < int(batches.size()); ++i) actions.push_back({Action::F, c, i});
    walk(plan(forward, settings_.placement)[size_t(pp_.rank())], Tape::Mode::Forget, {});
  }

  bool has_last_stage() const { return settings_.placement.rank_of(last_stage()) == pp_.rank(); }
  const Settings& settings() const { return settings_; }

 private:
  // One micro-batch in one chunk, from its forward to its last backward action.
  struct InFlight {
    std::unique_ptr<Tape> tape;
    Var in, out;
  };

  void walk(const std::vector<Round>& rounds, Tape::Mode mode, const Observer& observer) {
    for (const Round& round : rounds) {
      if (round.action) {
        Tensor given = input_of(*round.action);  // here it waits, if it must
        if (observer) observer(*round.action, true);
        compute(*round.action, std::move(given), mode);
        if (observer) observer(*round.action, false);
      }
      if (!round.messages.empty()) exchange(round.messages);
    }
    for (auto& [peer, lane] : sent_) {
      for (Work& work : lane) work.wait();
      lane.clear();
    }
    require(mail_.empty() && in_flight_.empty(), "a schedule that leaves something unfinished");
  }

  // What the stage before has made for F, what the stage behind has made for B or I.
  Tensor input_of(const Action& a) {
    int stage = stage_of(a);
    if (a.kind == Action::W) return {};
    if (a.kind == Action::F) return stage == 0 ? Tensor() : take({false, stage - 1, a.micro});
    return stage == last_stage() ? one_ : take({true, stage + 1, a.micro});
  }

  void compute(const Action& a, Tensor given, Tape::Mode mode) {
    switch (a.kind) {
      case Action::F: return forward(a, std::move(given), mode);
      case Action::B: return backward(a, std::move(given), Tape::WeightWork::Now);
      case Action::I: return backward(a, std::move(given), Tape::WeightWork::Later);
      case Action::W:
        in_flight_.at({a.chunk, a.micro}).tape->weight_work();
        in_flight_.erase({a.chunk, a.micro});
        return;
    }
  }

  void forward(const Action& a, Tensor x, Tape::Mode mode) {
    const MicroBatch& batch = (*batches_)[size_t(a.micro)];
    InFlight now{std::make_unique<Tape>(mode), {}, {}};
    int stage = stage_of(a);
    if (stage > 0) now.in = now.tape->leaf(std::move(x));
    now.out = chunk(a).forward(*now.tape, batch, now.in);
    now.in.value = {};
    if (stage == last_stage()) {
      now.out = chunk(a).loss(*now.tape, now.out, batch, scale_);
      add_loss_(now.out.value);
    } else {
      mail_[{false, stage, a.micro}] = now.out.value;
    }
    now.out.value = {};
    if (mode == Tape::Mode::Record) in_flight_[{a.chunk, a.micro}] = std::move(now);
  }

  void backward(const Action& a, Tensor d_out, Tape::WeightWork when) {
    InFlight& now = in_flight_.at({a.chunk, a.micro});
    int stage = stage_of(a);
    now.tape->backward(now.out, std::move(d_out), when);
    if (stage > 0) mail_[{true, stage, a.micro}] = now.tape->take_gradient(now.in);
    if (when == Tape::WeightWork::Now) in_flight_.erase({a.chunk, a.micro});
  }

  void exchange(std::vector<Message> messages) {
    auto sender = [this](const Message& m) { return m.sends ? pp_.rank() : m.peer; };
    std::stable_sort(messages.begin(), messages.end(),
                     [&](const Message& a, const Message& b) { return sender(a) < sender(b); });
    for (const Message& m : messages) {
      Product product{m.gradient, m.stage, m.micro};
      if (m.sends) {
        std::deque<Work>& lane = sent_[m.peer];
        if (lane.size() == kUnderWay) lane.front().wait(), lane.pop_front();
        lane.push_back(pp_.exchange({{P2P::Send, m.peer, mail_.extract(product).mapped()}}));
      } else {
        Tensor room = mail_[product] = room_for(m.micro);
        arriving_[product] = pp_.exchange({{P2P::Receive, m.peer, room}});
      }
    }
  }

  // What another stage has made, as soon as it has arrived.
  Tensor take(const Product& product) {
    if (auto arrives = arriving_.extract(product)) arrives.mapped().wait();
    return std::move(mail_.extract(product).mapped());
  }

  // [T of this rank, H], as a stage passes it on.
  Tensor room_for(int micro) const {
    const Stage& stage = *chunks_[0];
    int64_t rows = share((*batches_)[size_t(micro)].inputs.size(), settings_.stream_rows).count;
    return Tensor::empty({rows, stage.config().hidden}, stage.compute(), stage.device());
  }
  Stage& chunk(const Action& a) const { return *chunks_[size_t(a.chunk)]; }
  int stage_of(const Action& a) const { return settings_.placement.stage(pp_.rank(), a.chunk); }
  int last_stage() const { return settings_.placement.stages() - 1; }

  static constexpr size_t kUnderWay = 2;  // messages from here to one peer
  std::vector<Stage*> chunks_;
  Communicator& pp_;
  Settings settings_;
  std::map<int, std::vector<Round>> plans_;  // by number of micro-batches

  const std::vector<MicroBatch>* batches_ = nullptr;
  Tensor scale_, one_;
  std::function<void(const Tensor&)> add_loss_;
  std::map<std::pair<int, int>, InFlight> in_flight_;  // by chunk, micro-batch
  std::map<Product, Tensor> mail_;                     // made or received, not used yet
  std::map<Product, Work> arriving_;
  std::map<int, std::deque<Work>> sent_;  // by peer, oldest first; their buffers live as long
};

}  // namespace lockstep
