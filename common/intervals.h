#pragma once
// Stretches of time, and what several of them cover together: an instant that two of them share
// counts once.
//
//   all      |———|      |————|  |——|             united   |—————————|  |————|  |——|
//               |——————|                          length_of: what lies under the lines

#include <algorithm>
#include <cstdint>
#include <vector>

namespace lockstep {

struct Interval {  // nanoseconds
  int64_t begin, end;
  int64_t length() const { return std::max<int64_t>(0, end - begin); }
};

inline Interval common_part(const Interval& a, const Interval& b) {
  return {std::max(a.begin, b.begin), std::min(a.end, b.end)};
}

// Sorted, without overlap.
inline std::vector<Interval> united(std::vector<Interval> all) {
  std::sort(all.begin(), all.end(),
            [](const Interval& a, const Interval& b) { return a.begin < b.begin; });
  std::vector<Interval> out;
  for (const Interval& i : all) {
    if (!out.empty() && i.begin <= out.back().end) {
      out.back().end = std::max(out.back().end, i.end);
    } else {
      out.push_back(i);
    }
  }
  return out;
}

// Of intervals without overlap.
inline int64_t length_of(const std::vector<Interval>& intervals) {
  int64_t sum = 0;
  for (const Interval& i : intervals) sum += i.length();
  return sum;
}

// The time in which both a and b are: what is in both is counted twice in the sum of their lengths.
inline int64_t common_length(const std::vector<Interval>& a, const std::vector<Interval>& b) {
  std::vector<Interval> both = united(a);
  int64_t sum = length_of(both);
  std::vector<Interval> other = united(b);
  sum += length_of(other);
  both.insert(both.end(), other.begin(), other.end());
  return sum - length_of(united(both));
}

}  // namespace lockstep
