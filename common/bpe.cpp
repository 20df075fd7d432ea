#include "common/bpe.h"

#include <queue>
#include <tuple>

namespace lockstep {

namespace {

constexpr int32_t kNone = -1;

struct Candidate {  // a pair that may be merged, as it was when it entered the queue
  int32_t rank, place, left, right, merged;
  // The smallest rank first, and of equal ones the leftmost.
  bool operator<(const Candidate& other) const {
    return std::tie(rank, place) > std::tie(other.rank, other.place);
  }
};

}  // namespace

std::vector<int32_t> Merges::apply(std::vector<int32_t> tokens) const {
  int32_t n = int32_t(tokens.size());
  // A merged pair lives on in its left place; next and previous skip the places that are gone.
  std::vector<int32_t> next(tokens.size()), previous(tokens.size());
  std::priority_queue<Candidate> queue;
  auto consider = [&](int32_t place) {
    if (place == kNone || next[size_t(place)] == kNone) return;
    int32_t left = tokens[size_t(place)], right = tokens[size_t(next[size_t(place)])];
    auto found = merges_.find(key(left, right));
    if (found != merges_.end())
      queue.push({found->second.rank, place, left, right, found->second.merged});
  };
  for (int32_t i = 0; i < n; ++i) {
    next[size_t(i)] = i + 1 < n ? i + 1 : kNone;
    previous[size_t(i)] = i - 1;  // kNone for the first
  }
  for (int32_t i = 0; i < n; ++i) consider(i);

  while (!queue.empty()) {
    Candidate c = queue.top();
    queue.pop();
    size_t place = size_t(c.place);
    int32_t gone = next[place];
    bool still_there = tokens[place] == c.left && gone != kNone && tokens[size_t(gone)] == c.right;
    if (!still_there) continue;  // one of the two has become part of another token
    tokens[place] = c.merged;
    tokens[size_t(gone)] = kNone;
    next[place] = next[size_t(gone)];
    if (next[place] != kNone) previous[size_t(next[place])] = c.place;
    consider(previous[place]);
    consider(c.place);
  }
  std::erase(tokens, kNone);
  return tokens;
}

}  // namespace lockstep
