#include "common/feed.h"

#include <algorithm>
#include <cstring>

namespace lockstep {

Upload::~Upload() {
  for (Slot& slot : slots_) {
    if (slot.memory) slot.copied.wait();
    device::deallocate_pinned(slot.memory);
  }
}

std::vector<Tensor> Upload::operator()(const std::vector<Tensor>& host) {
  if (device_ == Device::CPU) return host;
  Slot& slot = slots_[size_t(uploads_++ % 2)];
  size_t bytes = 0;
  for (const Tensor& t : host) bytes += size_t(t.bytes());
  if (slot.memory) slot.copied.wait();  // the copy before last: long done
  if (bytes > slot.bytes) {
    device::deallocate_pinned(slot.memory);
    slot.memory = static_cast<std::byte*>(device::allocate_pinned(bytes));
    slot.bytes = bytes;
  }
  std::vector<Tensor> out;
  std::byte* at = slot.memory;
  for (const Tensor& t : host) {
    if (t.bytes() > 0) std::memcpy(at, t.raw(), size_t(t.bytes()));
    out.push_back(Tensor::empty(t.shape(), t.dtype(), device_, Category::Buffers));
    device::copy(out.back().raw(), device_, at, Device::CPU, size_t(t.bytes()));
    at += t.bytes();
  }
  slot.copied.record();
  return out;
}

Feed::Feed(const Corpus& corpus, const Options& o, Cut data)
    : corpus_(corpus),
      train_(corpus.windows(Split::Train, o.sequence), o.seed),
      in_order_(Sampler::in_order(corpus.windows(Split::Validation, o.sequence))),
      upload_(o.device),
      data_(data),
      length_(o.sequence),
      micro_batch_(o.micro_batch),
      batch_sequences_(o.batch_sequences()) {
  samples_ = o.epochs > 0 ? o.epochs * train_.windows() : o.steps * batch_sequences_;
  steps_ = (samples_ + batch_sequences_ - 1) / batch_sequences_;
  validation_windows_ =
      std::min(corpus.windows(Split::Validation, o.sequence), o.evaluation_batches * micro_batch_);
}

StepBatch Feed::upload(const std::vector<Batch>& batches) {
  std::vector<Tensor> host;
  int64_t valid = 0;
  StepBatch step;
  for (const Batch& b : batches) {
    host.insert(host.end(), {b.inputs, b.targets, b.positions, b.rows});
    valid += b.valid;
  }
  host.push_back(Tensor::from<int64_t>({valid}, {1}));
  std::vector<Tensor> here = upload_(host);
  for (size_t i = 0; i < batches.size(); ++i) {
    step.micro_batches.push_back({here[4 * i], here[4 * i + 1], here[4 * i + 2], here[4 * i + 3],
                                  batches[i].sequences, batches[i].length});
  }
  step.valid = here.back();
  return step;
}

StepBatch Feed::step(int64_t index) {
  int64_t first = index * batch_sequences_;
  int64_t end = std::min(first + batch_sequences_, samples_);
  std::vector<Batch> batches;
  for (int64_t turn = first; turn < end; turn += micro_batch_ * data_.size)
    batches.push_back(part(Split::Train, train_, turn + micro_batch_ * data_.rank, end));
  StepBatch step = upload(batches);
  step.tokens = (end - first) * length_;
  return step;
}

// A micro-batch that begins with sample `first`, if there is one before `end`.
Batch Feed::part(Split split, const Sampler& sampler, int64_t first, int64_t end) const {
  if (first < end)
    return load(corpus_, split, sampler, {first, std::min(micro_batch_, end - first)}, length_);
  Batch pad = load(corpus_, split, sampler, {0, 1}, length_);
  std::fill_n(pad.targets.data<int32_t>(), length_, -1);
  pad.valid = 0;
  return pad;
}

std::vector<MicroBatch> Feed::validation() {
  Range mine = share(validation_windows_, data_);
  int64_t most = share(validation_windows_, {0, data_.size}).count;  // the first rank's
  std::vector<Batch> batches;
  for (int64_t i = 0; i < most; i += micro_batch_)
    batches.push_back(part(Split::Validation, in_order_, mine.first + i, mine.first + mine.count));
  std::vector<MicroBatch> out = upload(batches).micro_batches;
  for (MicroBatch& b : out) b.training = false;
  return out;
}

}  // namespace lockstep
