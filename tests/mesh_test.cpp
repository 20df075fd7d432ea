// Ranks, coordinates and groups of every mesh of up to 64 ranks, against a second way to say it:
// strides. Along an axis of n ranks that lie s apart, the group of rank r starts at
// r - (r / s) % n * s and goes on in steps of s.

#include "common/mesh.h"

#include <gtest/gtest.h>

#include <set>

#include "common/ranks.h"
#include "tests/temporary.h"

namespace lockstep {
namespace {

using Ranks = std::vector<int>;

Ranks along(int rank, int n, int stride) {
  Ranks members;
  int start = rank - rank / stride % n * stride;
  for (int i = 0; i < n; ++i) members.push_back(start + i * stride);
  return members;
}

// The ranks of rank's data group, in order: DP replicas, of each its CP ranks.
Ranks data_group(const MeshShape& s, int rank) {
  Ranks members;
  for (int replica : along(rank, s.dp, s.pp * s.cp * s.tp))
    for (int r : along(replica, s.cp, s.tp)) members.push_back(r);
  return members;
}

// Every n-th of `from`, or n neighbours of it: the ones with `rank` among them.
Ranks every(const Ranks& from, int n, int rank) {
  size_t place = size_t(std::find(from.begin(), from.end(), rank) - from.begin());
  Ranks members;
  for (size_t i = place % size_t(n); i < from.size(); i += size_t(n)) members.push_back(from[i]);
  return members;
}
Ranks neighbours(const Ranks& from, int n, int rank) {
  size_t place = size_t(std::find(from.begin(), from.end(), rank) - from.begin());
  auto start = from.begin() + long(place / size_t(n)) * n;
  return Ranks(start, start + n);
}

Ranks expected_group(const MeshShape& s, Group kind, int64_t kv_heads, int rank) {
  int all = int(s.ranks());
  switch (kind) {
    case Group::World: return along(rank, all, 1);
    case Group::TP: return along(rank, s.tp, 1);
    case Group::CP: return along(rank, s.cp, s.tp);
    case Group::PP: return along(rank, s.pp, s.cp * s.tp);
    case Group::DP: return along(rank, s.dp, s.pp * s.cp * s.tp);
    case Group::Data: return data_group(s, rank);
    case Group::EP: return neighbours(data_group(s, rank), s.ep, rank);
    case Group::ExpertData: return every(data_group(s, rank), s.ep, rank);
    case Group::KvCopies: {
      int copies = kv_heads < s.tp ? s.tp / int(kv_heads) : 1;
      return along(rank, copies, 1);
    }
    case Group::Ends: {
      Ranks stages = along(rank, s.pp, s.cp * s.tp);
      bool at_an_end = rank == stages.front() || rank == stages.back();
      if (!at_an_end || s.pp == 1) return {rank};
      return {stages.front(), stages.back()};
    }
  }
  return {};
}

template <class F>
void for_every_shape(int most, F&& f) {
  for (int dp = 1; dp <= most; ++dp)
    for (int pp = 1; dp * pp <= most; ++pp)
      for (int cp = 1; dp * pp * cp <= most; ++cp)
        for (int tp = 1; dp * pp * cp * tp <= most; ++tp)
          for (int ep = 1; ep <= dp * cp; ++ep)
            if (dp * cp % ep == 0) f(MeshShape{dp, pp, cp, tp, ep});
}

TEST(Mesh, GroupsOfEveryShapeUpTo64RanksAreThoseOfTheFormula) {
  int shapes = 0;
  for_every_shape(64, [&](const MeshShape& s) {
    ++shapes;
    ASSERT_NO_THROW(s.validate(s.ranks()));
    for (Group kind : kGroups)
      for (int64_t kv_heads = 1; kv_heads <= 2 * s.tp; ++kv_heads) {
        if (kv_heads > 1 && kind != Group::KvCopies) break;
        if (s.tp % kv_heads != 0 && kv_heads % s.tp != 0) continue;
        std::vector<int> found(size_t(s.ranks()));
        size_t size = 0;
        for (const Ranks& members : groups(s, kind, kv_heads)) {
          bool like_the_others = size == 0 || members.size() == size || kind == Group::Ends;
          ASSERT_TRUE(like_the_others) << s.words() << name_of(kind);
          size = members.size();
          for (int r : members) {
            ++found[size_t(r)];
            ASSERT_EQ(members, expected_group(s, kind, kv_heads, r))
                << s.words() << " EP" << s.ep << " " << name_of(kind) << " of rank " << r;
          }
        }
        ASSERT_EQ(found, std::vector<int>(size_t(s.ranks()), 1)) << s.words() << name_of(kind);
      }
  });
  EXPECT_GT(shapes, 1500);
}

TEST(Mesh, RanksAndCoordinatesAreInverse) {
  for_every_shape(64, [&](const MeshShape& s) {
    for (int r = 0; r < s.ranks(); ++r) ASSERT_EQ(rank_at(s, coordinates(s, r)), r);
  });
  MeshShape s{2, 3, 5, 7};
  EXPECT_EQ(coordinates(s, 0), (Coordinates{0, 0, 0, 0}));
  EXPECT_EQ(coordinates(s, 1), (Coordinates{0, 0, 0, 1}));
  EXPECT_EQ(coordinates(s, 7), (Coordinates{0, 0, 1, 0}));
  EXPECT_EQ(coordinates(s, 35), (Coordinates{0, 1, 0, 0}));
  EXPECT_EQ(coordinates(s, 105), (Coordinates{1, 0, 0, 0}));
  expect_refusal([&] { coordinates(s, 210); }, {"no rank 210", "DP2×TP7×PP3×CP5"});
}

// A rank of ep and a rank of expert_data name an expert's copy: together they are the data group.
TEST(Mesh, EveryExpertIsOnceInAnEpGroupAndInEveryRankOfExpertData) {
  for_every_shape(32, [&](const MeshShape& s) {
    for (const Ranks& members : groups(s, Group::EP)) {
      std::set<int> experts;
      for (int r : members) experts.insert(expert_index(s, coordinates(s, r)));
      ASSERT_EQ(int(experts.size()), s.ep);
    }
    for (const Ranks& members : groups(s, Group::ExpertData))
      for (int r : members)
        ASSERT_EQ(expert_index(s, coordinates(s, r)),
                  expert_index(s, coordinates(s, members.front())));
  });
}

TEST(Mesh, C13_RanksAreTheProductOfTheAxesWithoutEp) {
  MeshShape s{.dp = 16, .pp = 8, .tp = 8};
  EXPECT_EQ(s.ranks(), 1024);
  EXPECT_NO_THROW(s.validate(1024));
  EXPECT_EQ(groups(s, Group::TP).size(), 128u);
  EXPECT_EQ(groups(s, Group::TP)[1], (Ranks{8, 9, 10, 11, 12, 13, 14, 15}));
  EXPECT_EQ(groups(s, Group::PP)[0], (Ranks{0, 8, 16, 24, 32, 40, 48, 56}));
  EXPECT_EQ(groups(s, Group::DP)[0].size(), 16u);
  EXPECT_EQ(groups(s, Group::DP)[0][1], 64);
  s.ep = 8;  // the ranks stay as many
  EXPECT_EQ(s.ranks(), 1024);
  EXPECT_NO_THROW(s.validate(1024));
  EXPECT_EQ(groups(s, Group::EP).size(), 128u);
}

TEST(Mesh, Pitfall127_WrongProductsAndExpertsAreRefusedWithTheRule) {
  auto refuses = [](MeshShape s, int world, const std::vector<std::string>& parts) {
    expect_refusal([&] { s.validate(world); }, parts);
  };
  refuses({.dp = 2, .tp = 2}, 8,
          {"DP2×TP2×PP1×CP1 = 4 ≠ 8", "DP4 would fit", "start 4 ranks", "EP is no factor"});
  refuses({.tp = 3}, 8, {"DP1×TP3×PP1×CP1 = 3 ≠ 8", "must divide 8"});
  refuses({.dp = 2, .tp = 2, .ep = 2}, 8, {"= 4 ≠ 8"});  // not 8 because of EP
  refuses({.dp = 2, .ep = 3}, 2, {"EP3", "DP×CP = 2×1 = 2", "valid are 1, 2"});
  refuses({.dp = 2, .tp = 2, .ep = 4}, 4, {"EP4", "valid are 1, 2"});  // TP is not for experts
  EXPECT_NO_THROW((MeshShape{.dp = 2, .cp = 3, .ep = 6}.validate(6)));
  refuses({.pp = 0}, 1, {"PP is 0"});
  refuses({.cp = -2}, 1, {"CP is -2"});
  refuses({.ep = 0}, 1, {"EP is 0"});
  MeshShape enormous{65536, 65536, 65536, 1};
  refuses(enormous, 8, {"281474976710656 ≠ 8"});
}

TEST(Mesh, KeyValueHeadsMustDivideTensorParallelRanksOrTheOtherWayRound) {
  MeshShape s{.tp = 4};
  EXPECT_EQ(groups(s, Group::KvCopies, 2), (std::vector<Ranks>{{0, 1}, {2, 3}}));
  EXPECT_EQ(groups(s, Group::KvCopies, 1), (std::vector<Ranks>{{0, 1, 2, 3}}));
  EXPECT_EQ(groups(s, Group::KvCopies, 8).size(), 4u);
  EXPECT_EQ(groups(s, Group::KvCopies).size(), 4u);
  expect_refusal([&] { groups(s, Group::KvCopies, 3); }, {"3 key/value heads", "TP4"});
  expect_refusal([&] { groups(s, Group::KvCopies, 6); }, {"6 key/value heads", "TP4"});
}

TEST(Mesh, PartsAreContiguousAndCoverEverything) {
  for (int64_t count : {0, 1, 7, 8, 32})
    for (int parts : {1, 2, 3, 8}) {
      int64_t next = 0;
      for (int i = 0; i < parts; ++i) {
        Range r = share(count, {i, parts});
        EXPECT_EQ(r.first, next);
        EXPECT_TRUE(r.count == count / parts || r.count == (count + parts - 1) / parts);
        next += r.count;
      }
      EXPECT_EQ(next, count);
    }
}

TEST(Mesh, DescribeIsATableOfWhoHoldsWhat) {
  Holdings whole{.layers = 5, .heads = 8, .kv_heads = 2, .experts = 4, .sequences = 6};
  MeshShape s{.dp = 2, .pp = 2, .tp = 4, .ep = 2};
  std::string table = describe(s, whole);
  EXPECT_NE(table.find("DP2×TP4×PP2×CP1 = 16 ranks, EP2 inside of DP×CP\n"), std::string::npos);
  EXPECT_NE(table.find("  rank  dp  pp  cp  tp  ep  layers  heads  kv heads  experts  sequences\n"
                       "     0   0   0   0   0   0     0-2    0-1         0      0-1        0-2\n"
                       "     1   0   0   0   1   0     0-2    2-3         0      0-1        0-2\n"
                       "     2   0   0   0   2   0     0-2    4-5         1      0-1        0-2\n"),
            std::string::npos)
      << table;
  EXPECT_NE(table.find("    15   1   1   0   3   1     3-4    6-7         1      2-3        3-5\n"),
            std::string::npos)
      << table;
  EXPECT_NE(describe({.cp = 4}, {.layers = 2}).find("1/4"), std::string::npos);
  std::string large = describe({.dp = 16, .pp = 8, .tp = 8}, {.layers = 80});
  EXPECT_NE(large.find("… and 960 more"), std::string::npos);
  EXPECT_EQ(std::count(large.begin(), large.end(), '\n'), 1 + 1 + 64 + 1);
}

// The communicators are those groups, under their names.
TEST(Mesh, CommunicatorsAreTheGroups) {
  MeshShape s{.dp = 2, .pp = 1, .cp = 2, .tp = 2, .ep = 2};
  run_threads(8, Device::CPU, {}, [&](Communicator& world) {
    ProcessMesh mesh(world, s, 1);
    for (Group kind : kGroups) {
      Communicator& group = mesh.group(kind);
      Ranks expected = expected_group(s, kind, 1, world.rank());
      require(group.size() == int(expected.size()), group.name(), " has ", group.size());
      require(expected[size_t(group.rank())] == world.rank(), "place in ", group.name());
      Tensor bits = Tensor::from<int32_t>({1 << world.rank()}, {1});
      group.all_reduce(bits).wait();
      int sum = 0;
      for (int r : expected) sum += 1 << r;
      require(bits.values<int32_t>()[0] == sum, "the members of ", group.name());
    }
    require(&mesh.group(Axis::Data) == &mesh.data(), "Axis::Data");
    require(&mesh.group(Axis::ExpertData) == &mesh.group(Group::ExpertData), "Axis::ExpertData");
    require(&mesh.group(Axis::TP) == &mesh.tp(), "Axis::TP");
    require(mesh.here() == coordinates(s, world.rank()), "coordinates");
  });
  EXPECT_THROW(run_threads(4, Device::CPU, {}, [&](Communicator& w) { ProcessMesh(w, s, 1); }),
               Error);
}

}  // namespace
}  // namespace lockstep
