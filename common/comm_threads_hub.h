#pragma once
// Where the ranks of one group meet, when ranks are threads.
//
// A collective is a *slot* in a table, found by its number: the first rank that launches it opens
// the slot, every rank puts its *part* there, and the last that has taken its result closes it. A
// message of an exchange is a *letter* in a mailbox, found by sender, receiver and number.
//
// One mutex and one condition variable guard both. Nobody reads a part before all are there, and
// nobody writes one after that, so that reading needs no lock.

#include <atomic>
#include <chrono>
#include <condition_variable>
#include <map>
#include <mutex>
#include <string_view>
#include <tuple>

#include "common/comm_threads.h"
#include "common/device.h"

namespace lockstep {

// What all ranks must mean alike before one reads another's data.
struct Terms {
  std::string_view what;
  int64_t size = 0;  // elements
  DType dtype = DType::U8;
  int root = -1;
  bool operator==(const Terms&) const = default;
  std::string words() const {
    return text(what, " of ", size, " ", name_of(dtype), root >= 0 ? text(", root ", root) : "");
  }
};

// One rank's contribution to one operation.
struct Part {
  Terms terms;
  Tensor data;                             // a copy; undefined if this rank gives nothing
  std::string words;                       // of exchange_texts and split
  std::vector<int64_t> rows;               // of all_to_all
  std::shared_ptr<device::Event> written;  // on a GPU: when the copy is complete
};

// One collective, from the first rank that posts to the last that has taken its result.
struct Slot {
  std::vector<Part> parts;
  int posted = 0, done = 0;
  std::vector<bool> came;
  Tensor sum;  // of an all_reduce: ranks share the adding
  std::atomic<int64_t> next_piece = 0, pieces_done = 0;
  std::vector<std::shared_ptr<device::Event>> readers;
};

class Hub {
 public:
  Hub(int size, std::shared_ptr<Failure> failure) : size(size), failure(std::move(failure)) {}
  const int size;
  const std::shared_ptr<Failure> failure;
  std::mutex mutex;
  std::condition_variable changed;
  std::map<int64_t, std::shared_ptr<Slot>> slots;      // by number of the collective
  std::map<std::tuple<int, int, int64_t>, Part> mail;  // from, to, number
  struct Child {
    std::shared_ptr<Hub> hub;
    int found = 0;  // members that know it
  };
  std::map<std::pair<int64_t, int>, Child> children;  // of a split under way: number, color

  // Waits under `lock` until ready() holds, a rank has failed, or the time is over.
  template <class Ready, class Missing>
  void await(std::unique_lock<std::mutex>& lock, double seconds, Ready&& ready, Missing&& missing) {
    auto limit = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
    while (!ready()) {
      require(!failure->happened, "stopped, because another rank failed");
      if (std::chrono::steady_clock::now() >= limit) fail(missing());
      changed.wait_for(lock, std::chrono::milliseconds(20));
    }
  }
};

// A copy that no rank's later writes can touch.
Part post_copy(const Tensor& t);
// Its data, safe to read in this rank's stream.
const Tensor& read(const Part& part);

// One rank's view of one collective: posted at construction, finished by take() in wait().
class Meeting : public Work::State {
 public:
  using Take = std::function<void(Slot&)>;
  Meeting(ThreadCommunicator& comm, Terms terms, Part part, Take take);
  void wait() override;

 private:
  std::string missing() const;
  void expect_same_terms() const;
  void leave();

  ThreadCommunicator& comm_;
  Hub& hub_;
  Terms terms_;
  int64_t number_;
  Take take_;
  std::shared_ptr<Slot> slot_;
};

// What one rank receives in one exchange. Its sends were delivered when they were posted.
class Letters : public Work::State {
 public:
  struct Expected {
    std::tuple<int, int, int64_t> address;
    int sender;  // its rank in the world
    Tensor buffer;
  };
  Letters(std::shared_ptr<Hub> hub, std::string group, double limit,
          std::vector<Expected> expected);
  void wait() override;

 private:
  std::string words(const Expected& e) const;
  Part fetch(const Expected& e);

  std::shared_ptr<Hub> hub_;
  std::string group_;
  double limit_;
  std::vector<Expected> expected_;
};

}  // namespace lockstep
