#pragma once
// The overlapped version, with as few collectives as possible: gradients lie one behind the other
// in buckets of 25 MB (buckets.h), and a bucket travels as one when its last gradient is there.
//
//   compute   forward | backward 9 … 1 0 |    | optimizer
//   network                  | b0  | b1  | b2  |
//
// Same bytes again, number of collectives = number of buckets. Small buckets pay overhead for each,
// large ones start late: the last bucket has nothing to hide behind.

#include "02_data_parallel/buckets.h"
#include "02_data_parallel/overlapped.h"

namespace lockstep {

class Bucketed : public Overlapped {
 public:
  using Overlapped::Overlapped;

 protected:
  void allocate_gradients() override {
    DType type = gradient_type(*chunks_[0]);
    buckets_ = make_buckets(chunks_, settings_.bucket_bytes / int64_t(size_of(type)));
    for (const Bucket& bucket : buckets_) {
      memory_.push_back(
          Tensor::empty({bucket.size}, type, bucket.stage->device(), Category::Gradients));
      give_out(bucket, memory_.back(), &Parameter::grad);
    }
  }

  std::vector<Piece> cut() override {
    std::vector<Piece> pieces;
    for (size_t b = 0; b < buckets_.size(); ++b)
      pieces.push_back({buckets_[b].parameters, memory_[b]});
    return pieces;
  }

 private:
  std::vector<Bucket> buckets_;
  std::vector<Tensor> memory_;
};

}  // namespace lockstep
