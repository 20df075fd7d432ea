#include "common/comm_threads_hub.h"

namespace lockstep {

std::shared_ptr<Hub> make_hub(int size, std::shared_ptr<Failure> failure) {
  return std::make_shared<Hub>(size, std::move(failure));
}

void Failure::report(int failed_rank, const std::string& what) {
  std::lock_guard lock(mutex);
  if (happened) return;
  rank = failed_rank;
  sentence = what;
  happened = true;
}

Part post_copy(const Tensor& t) {
  Part part;
  if (!t.defined()) return part;
  part.data = Tensor::empty(t.shape(), t.dtype(), t.device(), Category::Buffers);
  copy(part.data, t);
  if (t.device() == Device::CUDA) {
    part.written = std::make_shared<device::Event>();
    part.written->record();
  }
  return part;
}

const Tensor& read(const Part& part) {
  if (part.written) part.written->block_stream();
  return part.data;
}

Meeting::Meeting(ThreadCommunicator& comm, Terms terms, Part part, Take take)
    : comm_(comm), hub_(*comm.hub_), terms_(terms), number_(comm.calls_++), take_(std::move(take)) {
  part.terms = terms;
  std::lock_guard lock(hub_.mutex);
  std::shared_ptr<Slot>& slot = hub_.slots[number_];
  if (!slot) {
    slot = std::make_shared<Slot>();
    slot->parts.resize(size_t(hub_.size));
    slot->came.resize(size_t(hub_.size));
  }
  slot_ = slot;
  slot_->parts[size_t(comm.rank())] = std::move(part);
  slot_->came[size_t(comm.rank())] = true;
  if (++slot_->posted == hub_.size) hub_.changed.notify_all();
}

void Meeting::wait() {
  {
    std::unique_lock lock(hub_.mutex);
    hub_.await(
        lock, comm_.options().time_limit, [&] { return slot_->posted == hub_.size; },
        [&] { return missing(); });
  }
  expect_same_terms();
  if (take_) take_(*slot_);
  leave();
}

std::string Meeting::missing() const {
  std::string absent;
  for (int r = 0; r < hub_.size; ++r)
    if (!slot_->came[size_t(r)])
      absent += text(absent.empty() ? "" : ", ", comm_.world_ranks()[size_t(r)]);
  return text("waited ", comm_.options().time_limit, " s for ", terms_.what, " (number ", number_,
              " in \"", comm_.name(), "\"), to which rank ", absent, " never came");
}

void Meeting::expect_same_terms() const {
  const std::vector<Part>& parts = slot_->parts;
  for (size_t r = 1; r < parts.size(); ++r)
    require(parts[r].terms == parts[0].terms, "ranks of \"", comm_.name(),
            "\" do not call the same: rank 0 calls ", parts[0].terms.words(), ", rank ", r,
            " calls ", parts[r].terms.words());
}

// The last one out frees the copies; on a GPU not before every stream has read them.
void Meeting::leave() {
  std::shared_ptr<device::Event> read;
  for (const Part& p : slot_->parts)
    if (p.written && !read) {
      read = std::make_shared<device::Event>();
      read->record();
    }
  std::lock_guard lock(hub_.mutex);
  if (read) slot_->readers.push_back(read);
  if (++slot_->done < hub_.size) return;
  for (auto& event : slot_->readers) event->block_stream();
  hub_.slots.erase(number_);
  slot_->parts.clear();
  slot_->sum = {};
}

Letters::Letters(std::shared_ptr<Hub> hub, std::string group, double limit,
                 std::vector<Expected> expected)
    : hub_(std::move(hub)),
      group_(std::move(group)),
      limit_(limit),
      expected_(std::move(expected)) {}

void Letters::wait() {
  for (const Expected& e : expected_) {
    Part letter = fetch(e);
    require(letter.data.size() == e.buffer.size() && letter.data.dtype() == e.buffer.dtype(),
            words(e), " has ", letter.data.size(), " ", name_of(letter.data.dtype()),
            ", the receiver expects ", e.buffer.size(), " ", name_of(e.buffer.dtype()));
    copy(e.buffer, read(letter));  // the copy is freed here, in the stream that has read it
  }
}

std::string Letters::words(const Expected& e) const {
  return text("message ", std::get<2>(e.address), " of rank ", e.sender, " in an exchange of \"",
              group_, "\"");
}

Part Letters::fetch(const Expected& e) {
  std::unique_lock lock(hub_->mutex);
  hub_->await(
      lock, limit_, [&] { return hub_->mail.contains(e.address); },
      [&] { return text("waited ", limit_, " s for ", words(e), ", which never came"); });
  auto found = hub_->mail.find(e.address);
  Part letter = std::move(found->second);
  hub_->mail.erase(found);
  return letter;
}

}  // namespace lockstep
