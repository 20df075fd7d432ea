#include "common/mesh.h"

#include <algorithm>

#include "common/model_config.h"

namespace lockstep {

std::string MeshShape::words() const { return text("DP", dp, "×TP", tp, "×PP", pp, "×CP", cp); }

void MeshShape::validate(int64_t world) const {
  auto positive = [](const char* axis, int n) {
    require(n >= 1, axis, " is ", n, ": every axis of the mesh has at least 1 rank");
  };
  positive("DP", dp), positive("PP", pp), positive("CP", cp), positive("TP", tp);
  positive("EP", ep);
  if (ranks() != world) {
    int64_t model = ranks() / dp;  // of one copy
    std::string way_out = world % model == 0
                              ? text("DP", world / model, " would fit")
                              : text("PP×CP×TP must divide ", world, ", it is ", model);
    fail(text(words(), " = ", ranks(), " ≠ ", world, ": ", way_out, ", or start ", ranks(),
              " ranks (EP is no factor: experts are spread over the ranks of DP×CP)"));
  }
  require(data() % ep == 0, "EP", ep, " does not divide DP×CP = ", dp, "×", cp, " = ", data(),
          ", over whose ranks the experts are spread: valid are ", divisors(data()));
}

Coordinates coordinates(const MeshShape& s, int rank) {
  require(rank >= 0 && rank < s.ranks(), "there is no rank ", rank, " in ", s.words());
  Coordinates at;
  at.tp = rank % s.tp, rank /= s.tp;
  at.cp = rank % s.cp, rank /= s.cp;
  at.pp = rank % s.pp, rank /= s.pp;
  at.dp = rank;
  return at;
}

int rank_at(const MeshShape& s, const Coordinates& at) {
  return ((at.dp * s.pp + at.pp) * s.cp + at.cp) * s.tp + at.tp;
}

int data_index(const MeshShape& s, const Coordinates& at) { return at.dp * s.cp + at.cp; }
int expert_index(const MeshShape& s, const Coordinates& at) { return data_index(s, at) % s.ep; }

const char* name_of(Group group) {
  switch (group) {
    case Group::World: return "world";
    case Group::DP: return "dp";
    case Group::PP: return "pp";
    case Group::CP: return "cp";
    case Group::TP: return "tp";
    case Group::Data: return "data";
    case Group::EP: return "ep";
    case Group::ExpertData: return "expert_data";
    case Group::KvCopies: return "kv_copies";
    case Group::Ends: return "ends";
  }
  fail("unknown group");
}

Group group_of(Axis axis) {
  switch (axis) {
    case Axis::Data: return Group::Data;
    case Axis::ExpertData: return Group::ExpertData;
    case Axis::TP: return Group::TP;
    case Axis::KvCopies: return Group::KvCopies;
    case Axis::Ends: return Group::Ends;
  }
  fail("unknown axis");
}

// How many TP ranks hold the same key/value head.
static int kv_copies(const MeshShape& s, int64_t kv_heads) {
  if (kv_heads == 0) kv_heads = s.tp;
  require(kv_heads > 0 && (s.tp % kv_heads == 0 || kv_heads % s.tp == 0), kv_heads,
          " key/value heads cannot be spread over TP", s.tp,
          ": one must divide the other, so that each rank holds as many");
  return int(std::max<int64_t>(1, s.tp / kv_heads));
}

// The rank that stands for a group: ranks with the same one are in the same group. It is the rank's
// own place with the group's axis set to its start.
static int leader(const MeshShape& s, Group kind, int copies, int rank) {
  Coordinates at = coordinates(s, rank);
  auto to_data_index = [&](int d) { at.dp = d / s.cp, at.cp = d % s.cp; };
  int d = data_index(s, at);
  switch (kind) {
    case Group::World: return 0;
    case Group::DP: at.dp = 0; break;
    case Group::PP: at.pp = 0; break;
    case Group::CP: at.cp = 0; break;
    case Group::TP: at.tp = 0; break;
    case Group::Data: to_data_index(0); break;
    case Group::EP: to_data_index(d - d % s.ep); break;
    case Group::ExpertData: to_data_index(d % s.ep); break;
    case Group::KvCopies: at.tp -= at.tp % copies; break;
    case Group::Ends:
      if (at.pp == s.pp - 1) at.pp = 0;
      break;
  }
  return rank_at(s, at);
}

std::vector<std::vector<int>> groups(const MeshShape& shape, Group kind, int64_t kv_heads) {
  int copies = kind == Group::KvCopies ? kv_copies(shape, kv_heads) : 1;
  std::map<int, std::vector<int>> members;  // by leader
  for (int r = 0; r < shape.ranks(); ++r) members[leader(shape, kind, copies, r)].push_back(r);
  std::vector<std::vector<int>> all;
  for (auto& [first, ranks] : members) all.push_back(std::move(ranks));
  return all;
}

ProcessMesh::ProcessMesh(Communicator& world, MeshShape shape, int64_t kv_heads)
    : world_(world), shape_(shape) {
  shape.validate(world.size());
  here_ = coordinates(shape, world.rank());
  std::map<std::vector<std::vector<int>>, std::shared_ptr<Communicator>> made;
  for (Group kind : kGroups) {
    if (kind == Group::World) continue;
    std::shared_ptr<Communicator>& group = made[groups(shape, kind, kv_heads)];
    if (!group) {
      int copies = kind == Group::KvCopies ? kv_copies(shape, kv_heads) : 1;
      group = world.split(leader(shape, kind, copies, world.rank()), world.rank(), name_of(kind));
    }
    groups_[kind] = group;
  }
}

Communicator& ProcessMesh::group(Group kind) {
  return kind == Group::World ? world_ : *groups_.at(kind);
}

// A table whose columns are as wide as their longest word.
class Table {
 public:
  explicit Table(std::vector<std::string> head) { add(std::move(head)); }
  void add(std::vector<std::string> line) {
    widths_.resize(std::max(widths_.size(), line.size()));
    for (size_t i = 0; i < line.size(); ++i) widths_[i] = std::max(widths_[i], line[i].size());
    lines_.push_back(std::move(line));
  }
  std::string str() const {
    std::string out;
    for (const auto& line : lines_) {
      for (size_t i = 0; i < line.size(); ++i)
        out += std::string(widths_[i] + 2 - line[i].size(), ' ') + line[i];
      out += "\n";
    }
    return out;
  }

 private:
  std::vector<std::vector<std::string>> lines_;
  std::vector<size_t> widths_;
};

static std::string words(const Range& r) {
  if (r.count == 0) return "none";
  return r.count == 1 ? text(r.first) : text(r.first, "-", r.first + r.count - 1);
}

// Key/value heads of one TP rank.
static Range kv_part(const MeshShape& s, int64_t kv_heads, int tp) {
  kv_copies(s, kv_heads);  // refuses what cannot be spread
  return share_or_copy(kv_heads, {tp, s.tp});
}

std::string describe(const MeshShape& s, const Holdings& whole) {
  constexpr int kLines = 64;
  std::vector<std::string> head = {"rank", "dp", "pp", "cp", "tp"};
  if (s.ep > 1) head.push_back("ep");
  if (whole.layers) head.push_back("layers");
  if (whole.heads) head.push_back("heads");
  if (whole.kv_heads) head.push_back("kv heads");
  if (whole.experts) head.push_back("experts");
  if (whole.sequences) head.push_back("sequences");
  if (s.cp > 1) head.push_back("of each");
  Table table(head);
  for (int r = 0; r < std::min<int64_t>(s.ranks(), kLines); ++r) {
    Coordinates at = coordinates(s, r);
    std::vector<std::string> line = {text(r), text(at.dp), text(at.pp), text(at.cp), text(at.tp)};
    if (s.ep > 1) line.push_back(text(expert_index(s, at)));
    if (whole.layers) line.push_back(words(share(whole.layers, {at.pp, s.pp})));
    if (whole.heads) line.push_back(words(share(whole.heads, {at.tp, s.tp})));
    if (whole.kv_heads) line.push_back(words(kv_part(s, whole.kv_heads, at.tp)));
    if (whole.experts) line.push_back(words(share(whole.experts, {expert_index(s, at), s.ep})));
    if (whole.sequences) line.push_back(words(share(whole.sequences, {at.dp, s.dp})));
    if (s.cp > 1) line.push_back(text("1/", s.cp));
    table.add(std::move(line));
  }
  std::string title = text(s.words(), " = ", s.ranks(), s.ranks() == 1 ? " rank" : " ranks");
  if (s.ep > 1) title += text(", EP", s.ep, " inside of DP×CP");
  std::string more = s.ranks() > kLines ? text("  … and ", s.ranks() - kLines, " more\n") : "";
  return title + "\n" + table.str() + more;
}

}  // namespace lockstep
