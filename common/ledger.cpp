#include "common/ledger.h"

#include <algorithm>
#include <map>
#include <tuple>

#include "common/check.h"

namespace lockstep {

const char* name_of(Collective operation) {
  switch (operation) {
    case Collective::AllReduce: return "all_reduce";
    case Collective::Reduce: return "reduce";
    case Collective::Broadcast: return "broadcast";
    case Collective::AllGather: return "all_gather";
    case Collective::ReduceScatter: return "reduce_scatter";
    case Collective::Gather: return "gather";
    case Collective::Scatter: return "scatter";
    case Collective::AllToAll: return "all_to_all";
    case Collective::Exchange: return "exchange";
    case Collective::Barrier: return "barrier";
  }
  fail("unknown operation");
}

void Ledger::write(LedgerEntry entry) {
  entry.phase = phase_;
  entry.step = step_;
  entries_.push_back(std::move(entry));
}

static void add(Ledger::Sum& sum, const LedgerEntry& e) {
  ++sum.calls;
  sum.payload += e.payload;
  sum.wire += e.wire;
}

Ledger::Sum Ledger::sum(Collective operation, const std::string& group,
                        const std::string& phase) const {
  Sum sum;
  for (const LedgerEntry& e : entries_) {
    bool matches = e.operation == operation && (group.empty() || e.group == group) &&
                   (phase.empty() || e.phase == phase);
    if (matches) add(sum, e);
  }
  return sum;
}

Ledger::Sum Ledger::sum() const {
  Sum sum;
  for (const LedgerEntry& e : entries_) add(sum, e);
  return sum;
}

// times * K (n-1)/n. Where n does not divide K, a ring sends a few bytes more from one rank than
// from another; this is their mean, rounded up to a whole byte, and so the same on every rank. All
// n ranks together send exactly times * K (n-1). K is cut first: K times n could overflow.
static int64_t share_of_others(int64_t payload, int64_t n, int64_t times) {
  int64_t rest = payload % n * (n - 1) * times;
  return times * (payload / n) * (n - 1) + (rest + n - 1) / n;
}

int64_t wire_bytes(Collective operation, int64_t payload, int n) {
  require(payload >= 0 && n >= 1, "an operation on ", payload, " bytes among ", n, " ranks");
  if (n == 1) return 0;
  switch (operation) {
    // Each of K/n pieces is added up on its way through n-1 ranks and then told to n-1 ranks:
    // 2 (n-1) messages of K/n from every rank.
    case Collective::AllReduce: return share_of_others(payload, n, 2);
    // The first half of it, or the second.
    case Collective::ReduceScatter:
    case Collective::AllGather: return share_of_others(payload, n, 1);
    // A chain passes it on: everyone sends all of K once, except for the rank at the end.
    case Collective::Broadcast:
    case Collective::Reduce: return payload;
    case Collective::Gather: return (payload + n - 1) / n;             // a shard, to the root
    case Collective::Scatter: return share_of_others(payload, n, 1);   // the root: all but its own
    case Collective::AllToAll: return share_of_others(payload, n, 1);  // if all rows are even
    case Collective::Exchange: return payload;                         // what it sends
    case Collective::Barrier: return 0;
  }
  fail("unknown operation");
}

// Plays all ranks until none can go on. A rank's *head* is the operation that it stands at;
// whatever lies before has finished, whatever lies behind has not begun.
class StrictOrder {
 public:
  explicit StrictOrder(const std::vector<std::vector<LedgerEntry>>& ledgers)
      : ledgers_(ledgers), head_(ledgers.size()), posted_(ledgers.size()) {}

  std::string run() {
    for (bool moved = true; moved;) {
      moved = false;
      for (size_t r = 0; r < ledgers_.size(); ++r) post(r);
      for (size_t r = 0; r < ledgers_.size(); ++r)
        while (head(r) && finish(r)) moved = true;
    }
    return stuck();
  }

 private:
  // Messages are counted per group, sender and receiver: the k-th send matches the k-th receive.
  using Lane = std::tuple<std::string, std::vector<int>, int, int>;

  const LedgerEntry* head(size_t r) const {
    return head_[r] < ledgers_[r].size() ? &ledgers_[r][head_[r]] : nullptr;
  }

  // All messages of an exchange become visible to the peers at once: that is what grouping means.
  void post(size_t r) {
    const LedgerEntry* e = head(r);
    if (!e || posted_[r] || e->operation != Collective::Exchange) return;
    posted_[r] = true;
    for (int peer : e->sends) ++sent_[{e->group, e->members, int(r), peer}];
    for (int peer : e->receives) ++received_[{e->group, e->members, peer, int(r)}];
  }

  bool finish(size_t r) {
    const LedgerEntry& e = *head(r);
    if (e.operation == Collective::Exchange) {
      if (!all_matched(r, e)) return false;
      advance(r);
      return true;
    }
    for (int m : e.members) {
      const LedgerEntry* other = size_t(m) < ledgers_.size() ? head(size_t(m)) : nullptr;
      if (!other || !same(e, *other)) return false;
    }
    for (int m : e.members) advance(size_t(m));
    return true;
  }

  static bool same(const LedgerEntry& a, const LedgerEntry& b) {
    return a.operation == b.operation && a.root == b.root && a.group == b.group &&
           a.members == b.members;
  }

  // Every message so far on the lanes of this exchange has its counterpart.
  bool all_matched(size_t r, const LedgerEntry& e) {
    for (int peer : e.sends) {
      Lane lane{e.group, e.members, int(r), peer};
      if (received_[lane] < sent_[lane]) return false;
    }
    for (int peer : e.receives) {
      Lane lane{e.group, e.members, peer, int(r)};
      if (sent_[lane] < received_[lane]) return false;
    }
    return true;
  }

  void advance(size_t r) {
    ++head_[r];
    posted_[r] = false;
    post(r);
  }

  static std::string list(const char* word, const std::vector<int>& ranks) {
    std::string out;
    for (int r : ranks) out += text(out.empty() ? word : ", ", r);
    return out;
  }

  std::string stuck() const {
    constexpr int kNamed = 8;
    std::string who;
    int count = 0;
    for (size_t r = 0; r < ledgers_.size(); ++r) {
      const LedgerEntry* e = head(r);
      if (!e || ++count > kNamed) continue;
      who += text(who.empty() ? "" : "; ", "rank ", r, " at its operation ", head_[r], ", ",
                  name_of(e->operation), " in \"", e->group, "\"", list(", sending to ", e->sends),
                  list(", receiving from ", e->receives));
    }
    if (count == 0) return "";
    if (count > kNamed) who += text("; and ", count - kNamed, " more");
    return text("in strict order ", count, " of ", ledgers_.size(), " ranks are stuck: ", who);
  }

  const std::vector<std::vector<LedgerEntry>>& ledgers_;
  std::vector<size_t> head_;
  std::vector<bool> posted_;  // the messages of the exchange at the head
  std::map<Lane, int64_t> sent_, received_;
};

std::string strict_order(const std::vector<std::vector<LedgerEntry>>& ledgers) {
  return StrictOrder(ledgers).run();
}

}  // namespace lockstep
