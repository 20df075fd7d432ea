#include "common/mpi_engine.h"

#include <algorithm>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <set>

namespace lockstep {

using Clock = std::chrono::steady_clock;
using std::chrono::duration;
using std::chrono::microseconds;

void check_mpi(int status, std::source_location where) {
  if (status == MPI_SUCCESS) return;
  char words[MPI_MAX_ERROR_STRING];
  int length = 0;
  MPI_Error_string(status, words, &length);
  throw Error(text("MPI: ", std::string(words, size_t(length))), where);
}

// mpirun ends the other ranks with SIGTERM when one has failed. A signal handler reaches nothing
// but a global; the engine looks at it, and says what its rank was waiting for before it goes.
static volatile std::sig_atomic_t asked_to_end = 0;
static void on_sigterm(int) { asked_to_end = 1; }

std::string Operation::missing() const {
  std::set<int> senders, receivers;
  for (const Piece& p : pieces)
    if (p.open) (p.sent ? receivers : senders).insert(world_ranks[size_t(p.peer)]);
  const std::set<int>& absent = senders.empty() ? receivers : senders;
  std::string list;
  for (int r : absent) list += text(list.empty() ? "" : ", ", r);
  return text(absent.size() == 1 ? "rank " : "ranks ", list);
}

MpiEngine::MpiEngine(int rank, bool crowded) : rank_(rank), patience_(crowded ? 0 : 100) {
  std::signal(SIGTERM, on_sigterm);
  helper_ = std::thread([this, account = memory_account()] {
    memory_account() = account;
    help();
  });
}

MpiEngine::~MpiEngine() {
  {
    std::lock_guard lock(launched_mutex_);
    stop_ = true;
  }
  wake_up_.notify_one();
  helper_.join();
  std::signal(SIGTERM, SIG_DFL);
}

void MpiEngine::start(std::shared_ptr<Operation> operation) {
  ++under_way_;
  {
    std::lock_guard lock(launched_mutex_);
    launched_.push_back(std::move(operation));
  }
  wake_up_.notify_one();
  // Posted at once, unless the helper is at work and will do it: a launch does not wait.
  std::unique_lock lock(mpi_, std::try_to_lock);
  if (lock.owns_lock()) drive();
}

bool MpiEngine::call(double seconds, const std::function<void()>& f) {
  std::unique_lock lock(mpi_, duration<double>(seconds));
  if (lock.owns_lock()) f();
  return lock.owns_lock();
}

// How long to pause after looking `idle` times in vain.
static microseconds pause_after(int idle) { return microseconds(std::min(50 + idle / 4, 500)); }

void MpiEngine::wait(Operation& operation, double seconds) {
  ++waiting_;  // the helper steps back
  auto limit =
      Clock::now() + std::chrono::duration_cast<Clock::duration>(duration<double>(seconds));
  std::string absent;
  for (int idle = 0; !operation.done && absent.empty();) {
    {
      std::lock_guard lock(mpi_);
      idle = drive() ? 0 : idle + 1;
      if (!operation.done && Clock::now() > limit) absent = operation.missing();
    }
    if (idle >= 1000) {
      std::this_thread::sleep_for(pause_after(idle - 1000));
    } else if (idle > patience_) {
      std::this_thread::yield();
    }
  }
  --waiting_;
  require(absent.empty(), "waited ", seconds, " s for ", operation.name, ", to which ", absent,
          " never came");
  require(operation.error.empty(), operation.error);
}

// The helper's life. Waking up costs its rank more than a small message takes, so that it looks
// only now and then whether it is needed.
void MpiEngine::help() {
  constexpr std::chrono::milliseconds kNap(1);
  for (int idle = 0, unneeded = 0; !stop_;) {
    if (asked_to_end || (under_way_ > 0 && waiting_ == 0)) {
      std::unique_lock lock(mpi_);
      idle = drive() ? 0 : idle + 1;
      unneeded = 0;
      lock.unlock();
      if (idle > 0) std::this_thread::sleep_for(pause_after(idle));
    } else if (++unneeded < 10) {
      std::this_thread::sleep_for(kNap);
    } else {  // until it is called, or may have missed asked_to_end, which can notify nobody
      std::unique_lock lock(launched_mutex_);
      wake_up_.wait_for(lock, 100 * kNap, [&] { return stop_ || under_way_ > 0; });
      unneeded = 0;
    }
  }
}

// Moves on whatever can; did anything? Called with the lock.
bool MpiEngine::drive() {
  if (asked_to_end) say_goodbye();
  std::vector<std::shared_ptr<Operation>> fresh;
  {
    std::lock_guard lock(launched_mutex_);
    fresh.swap(launched_);
  }
  for (auto& op : fresh) {
    active_.push_back(op);
    try {
      post(*op);
    } catch (const std::exception& e) {
      finish(*op, e.what());
    }
  }
  bool moved = !fresh.empty();
  for (auto& op : active_) moved |= advance(*op);
  std::erase_if(active_, [&](const auto& op) {
    if (op->done && !op->error.empty()) failed_.push_back(op);
    return op->done.load();
  });
  return moved;
}

// Receives first, so that what arrives has a place to go to.
void MpiEngine::post(Operation& op) {
  const MessageStage& stage = op.stages[op.stage];
  op.requests.clear();
  op.pieces.clear();
  auto cut = [&](const Message& m, bool sends) {
    int64_t bytes = m.data.defined() ? m.data.bytes() : 0;
    for (int64_t at = 0; at == 0 || at < bytes; at += op.piece) {
      int n = int(std::min(op.piece, bytes - at));
      std::byte* data = n > 0 ? m.data.raw() + at : nullptr;
      MPI_Request& request = op.requests.emplace_back(MPI_REQUEST_NULL);
      op.pieces.push_back({m.peer, n, sends, true});
      check_mpi(sends ? MPI_Isend(data, n, MPI_BYTE, m.peer, op.tag, op.comm, &request)
                      : MPI_Irecv(data, n, MPI_BYTE, m.peer, op.tag, op.comm, &request));
    }
  };
  for (const Message& m : stage.receives) cut(m, false);
  for (const Message& m : stage.sends) cut(m, true);
  op.open = op.requests.size();
}

// Goes as far as it can.
bool MpiEngine::advance(Operation& op) {
  bool moved = false;
  try {
    while (!op.done) {
      moved |= collect(op);
      if (op.open > 0) return moved;
      const MessageStage& stage = op.stages[op.stage];
      if (stage.then) stage.then();
      if (++op.stage == op.stages.size()) {
        finish(op, "");
      } else {
        post(op);
      }
      moved = true;
    }
  } catch (const std::exception& e) {
    finish(op, e.what());
  }
  return moved;
}

// Takes note of messages that have arrived or gone.
bool MpiEngine::collect(Operation& op) {
  if (op.open == 0) return false;
  int count = 0;
  which_.resize(op.requests.size());
  states_.resize(op.requests.size());
  int result = MPI_Testsome(int(op.requests.size()), op.requests.data(), &count, which_.data(),
                            states_.data());
  if (result != MPI_ERR_IN_STATUS) check_mpi(result);
  for (int i = 0; i < count; ++i) {
    Operation::Piece& piece = op.pieces[size_t(which_[size_t(i)])];
    MPI_Status& state = states_[size_t(i)];
    piece.open = false;
    --op.open;
    if (piece.sent) continue;
    int came = 0;
    bool too_many = result == MPI_ERR_IN_STATUS && state.MPI_ERROR == MPI_ERR_TRUNCATE;
    if (result == MPI_ERR_IN_STATUS && !too_many) check_mpi(state.MPI_ERROR);
    if (!too_many) check_mpi(MPI_Get_count(&state, MPI_BYTE, &came));
    require(came == piece.bytes, "expects ", piece.bytes, " bytes from rank ",
            op.world_ranks[size_t(piece.peer)], " in ", op.name, ", which sent ",
            too_many ? "more" : text(came));
  }
  return count > 0;
}

void MpiEngine::finish(Operation& op, const std::string& error) {
  if (error.empty()) op.stages.clear();  // it may let go of the buffers now
  op.error = error;
  if (op.times) op.times->under_way->stop();
  op.done = true;
  --under_way_;
}

void MpiEngine::say_goodbye() {
  std::string waiting = "while it waited for nobody";
  if (!active_.empty())
    waiting = text("while it waited for ", active_[0]->name, ", to which ", active_[0]->missing(),
                   " had not come");
  std::fprintf(stderr, "rank %d was told to end (SIGTERM) %s\n", rank_, waiting.c_str());
  std::fflush(nullptr);
  std::_Exit(128 + SIGTERM);
}

}  // namespace lockstep
