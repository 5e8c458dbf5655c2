// Every layout of 1 to 16 ranks: groups partition the ranks, and a rank's position in a group is its place.
#include "optimus/comm/mesh.h"

#include <algorithm>
#include <functional>
#include <set>

#include <gtest/gtest.h>

#include "optimus/base/error.h"

namespace optimus::test {
namespace {

void for_every_layout(const std::function<void(const MeshShape&)>& body) {
  for (int world = 1; world <= 16; ++world)
    for (int pp = 1; pp <= world; ++pp)
      for (int ep = 1; ep <= world; ++ep) {
        if (world % pp != 0 || world / pp % ep != 0) continue;
        SCOPED_TRACE(fmt::format("world {}, pp {}, ep {}", world, pp, ep));
        body(make_mesh_shape(world, pp, ep));
      }
}

using GroupOf = std::vector<int> (*)(const MeshShape&, int);

/// Groups of that many ranks, ascending, the same seen from each member, each rank at its position.
void expect_partition(const MeshShape& shape, GroupOf group_of, int size, int MeshPlace::*position) {
  for (int rank = 0; rank < shape.world(); ++rank) {
    const std::vector<int> group = group_of(shape, rank);
    ASSERT_EQ(int(group.size()), size);
    EXPECT_TRUE(std::is_sorted(group.begin(), group.end()));
    EXPECT_EQ(std::set<int>(group.begin(), group.end()).size(), group.size());
    EXPECT_EQ(group[size_t(place_of(shape, rank).*position)], rank);
    for (int member : group) EXPECT_EQ(group_of(shape, member), group);
  }
}

TEST(Mesh, GroupsPartitionTheRanks) {
  for_every_layout([](const MeshShape& shape) {
    expect_partition(shape, dp_group, shape.dp, &MeshPlace::dp);
    expect_partition(shape, ep_group, shape.ep, &MeshPlace::ep);
    expect_partition(shape, edp_group, shape.edp, &MeshPlace::edp);
    expect_partition(shape, pp_group, shape.pp, &MeshPlace::pp);
  });
}

TEST(Mesh, FoldsTheSameRanksTwice) {
  for_every_layout([](const MeshShape& shape) {
    EXPECT_EQ(shape.pp * shape.dp, shape.world());
    EXPECT_EQ(shape.pp * shape.edp * shape.ep, shape.world());
    for (int rank = 0; rank < shape.world(); ++rank) {
      const MeshPlace place = place_of(shape, rank);
      EXPECT_EQ(place.dp, place.edp * shape.ep + place.ep);
      EXPECT_EQ(rank_of(shape, place.pp, place.dp), rank);
      // An expert group and its replicas meet in this rank alone, and together they span the data-parallel group.
      const std::vector<int> ep = ep_group(shape, rank), edp = edp_group(shape, rank), dp = dp_group(shape, rank);
      std::set<int> spanned;
      for (int member : ep)
        for (int replica : edp_group(shape, member)) spanned.insert(replica);
      EXPECT_EQ(spanned, std::set<int>(dp.begin(), dp.end()));
      std::vector<int> shared;
      std::set_intersection(ep.begin(), ep.end(), edp.begin(), edp.end(), std::back_inserter(shared));
      EXPECT_EQ(shared, std::vector<int>{rank});
    }
  });
}

TEST(Mesh, ExpertGroupsAreNeighbours) {
  for_every_layout([](const MeshShape& shape) {
    for (int rank = 0; rank < shape.world(); ++rank) {
      const std::vector<int> group = ep_group(shape, rank);
      EXPECT_EQ(group.back() - group.front(), shape.ep - 1);
    }
  });
}

TEST(Mesh, EmbeddingGroupIsTheFirstAndTheLastStage) {
  for_every_layout([](const MeshShape& shape) {
    for (int rank = 0; rank < shape.world(); ++rank) {
      const int dp = place_of(shape, rank).dp;
      const std::vector<int> group = embedding_group(shape, rank);
      ASSERT_EQ(group.size(), shape.pp == 1 ? 1u : 2u);
      EXPECT_EQ(group.front(), rank_of(shape, 0, dp));
      EXPECT_EQ(group.back(), rank_of(shape, shape.pp - 1, dp));
    }
  });
}

TEST(Mesh, AnExampleByHand) {
  const MeshShape shape = make_mesh_shape(16, 2, 4);
  EXPECT_EQ(shape, (MeshShape{.pp = 2, .dp = 8, .edp = 2, .ep = 4}));
  EXPECT_EQ(dp_group(shape, 13), (std::vector<int>{8, 9, 10, 11, 12, 13, 14, 15}));
  EXPECT_EQ(ep_group(shape, 13), (std::vector<int>{12, 13, 14, 15}));
  EXPECT_EQ(edp_group(shape, 13), (std::vector<int>{9, 13}));
  EXPECT_EQ(pp_group(shape, 13), (std::vector<int>{5, 13}));
  EXPECT_THROW(place_of(shape, 16), std::logic_error);
  EXPECT_THROW(rank_of(shape, 2, 0), std::logic_error);
}

std::string refusal(int64_t world, int64_t pp, int64_t ep) {
  try {
    make_mesh_shape(world, pp, ep);
  } catch (const Error& error) {
    EXPECT_EQ(int(error.kind()), int(ErrorKind::kUsage));
    return error.what();
  }
  return "accepted";
}

TEST(Mesh, RefusalsNameTheNearestLayout) {
  EXPECT_EQ(refusal(8, 1, 3), "ep = 3 does not divide dp = 8 (8 ranks / pp 1); the nearest that does is ep = 4");
  EXPECT_EQ(refusal(24, 2, 16), "ep = 16 does not divide dp = 12 (24 ranks / pp 2); the nearest that does is ep = 12");
  EXPECT_EQ(refusal(12, 5, 1), "pp = 5 does not divide the 12 ranks; the nearest that does is pp = 6");
  EXPECT_EQ(refusal(7, 3, 1), "pp = 3 does not divide the 7 ranks; the nearest that does is pp = 1");
  EXPECT_EQ(refusal(8, 0, 1), "pp = 0 does not divide the 8 ranks; the nearest that does is pp = 1");
  EXPECT_EQ(refusal(8, 1, -2), "ep = -2 does not divide dp = 8 (8 ranks / pp 1); the nearest that does is ep = 1");
  EXPECT_EQ(refusal(0, 1, 1), "a layout for 0 ranks");
}

}  // namespace
}  // namespace optimus::test
