#pragma once
// Who is who. A job of N ranks is cut along four axes, and every rank has one coordinate on each:
//
//   N = DP x PP x CP x TP         rank = ((dp * PP + pp) * CP + cp) * TP + tp
//
//   DP  data parallel       other samples, a copy of the weights      outermost
//   PP  pipeline parallel   other layers
//   CP  context parallel    another part of each sequence
//   TP  tensor parallel     other columns of each matrix              fastest: neighbours, NVLink
//
// EP, expert parallel, is no fifth factor: experts are spread over ranks that the model already
// has, those of DP x CP, which hold the same layers and see different tokens.
//
// Ranks that differ along one axis only form a group, and every axis cuts the ranks into such
// groups. All of that is arithmetic on numbers; a ProcessMesh then makes communicators of it.

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "common/comm.h"
#include "common/parameter.h"

namespace lockstep {

struct MeshShape {
  int dp = 1, pp = 1, cp = 1, tp = 1, ep = 1;
  int64_t ranks() const { return int64_t(dp) * pp * cp * tp; }
  int data() const { return dp * cp; }  // ranks that hold the same weights and see other tokens
  void validate(int64_t world) const;   // one sentence that names what would be valid
  std::string words() const;            // "DP2×TP2×PP1×CP1"
};

struct Coordinates {
  int dp = 0, pp = 0, cp = 0, tp = 0;
  bool operator==(const Coordinates&) const = default;
};
Coordinates coordinates(const MeshShape& shape, int rank);
int rank_at(const MeshShape& shape, const Coordinates& at);

// Where a rank stands among those of its data group (DP x CP, CP fastest), and what follows:
// experts are cut over neighbours in the data group, copies of one expert are ep ranks apart.
int data_index(const MeshShape& shape, const Coordinates& at);
int expert_index(const MeshShape& shape, const Coordinates& at);  // 0 … ep-1: which experts

enum class Group : uint8_t {
  World,
  DP,
  PP,
  CP,
  TP,
  Data,        // DP x CP: sums of gradients, ZeRO's shards
  EP,          // ep neighbours of Data: together they hold every expert once
  ExpertData,  // the ranks of Data that hold the same experts: DP x CP / EP
  KvCopies,    // TP ranks that hold the same key/value head: TP / kv heads, where TP is larger
  Ends,        // first and last stage, which share a tied embedding; stages between: each alone.
               // (Where a schedule folds the pipeline and both ends are one rank, nobody needs it.)
};
inline constexpr Group kGroups[] = {Group::World,    Group::DP,   Group::PP, Group::CP,
                                    Group::TP,       Group::Data, Group::EP, Group::ExpertData,
                                    Group::KvCopies, Group::Ends};
const char* name_of(Group group);
Group group_of(Axis axis);

// All groups of one kind: every rank is in exactly one, ranks ascend in each. kv_heads 0: as many
// as there are TP ranks.
std::vector<std::vector<int>> groups(const MeshShape& shape, Group kind, int64_t kv_heads = 0);

// The communicators of one rank. Collective over the world, like every split.
class ProcessMesh {
 public:
  ProcessMesh(Communicator& world, MeshShape shape, int64_t kv_heads = 0);
  const MeshShape& shape() const { return shape_; }
  const Coordinates& here() const { return here_; }

  Communicator& group(Group kind);
  Communicator& group(Axis axis) { return group(group_of(axis)); }
  Communicator& world() { return world_; }
  Communicator& dp() { return group(Group::DP); }
  Communicator& pp() { return group(Group::PP); }
  Communicator& cp() { return group(Group::CP); }
  Communicator& tp() { return group(Group::TP); }
  Communicator& data() { return group(Group::Data); }
  Communicator& ep() { return group(Group::EP); }

 private:
  Communicator& world_;
  MeshShape shape_;
  Coordinates here_;
  // Kinds whose groups have the same ranks (DP and Data without CP, say) share a communicator.
  std::map<Group, std::shared_ptr<Communicator>> groups_;
};

// What is dealt out among the ranks. 0: not part of the table.
struct Holdings {
  int64_t layers = 0, heads = 0, kv_heads = 0, experts = 0;
  int64_t sequences = 0;  // of the global batch
};
// A table for people: a line per rank with its coordinates and what it holds, layers in order from
// the first stage to the last.
std::string describe(const MeshShape& shape, const Holdings& whole);

}  // namespace lockstep
