// The mesh: which ranks form which group. Megatron's names, and its folding: the same ranks are folded twice,
//
//   world = pp * dp * cp * tp    for attention and dense parts,
//   world = pp * edp * ep * etp  for experts,
//
// and only pp must agree. dp and edp are derived. Rank order, fastest first: tp, cp, ep inside dp, dp, pp; so
// dp index = edp index * ep + ep index, and an expert-parallel group is `ep` neighbours.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace optimus {

/// Sizes of the axes. cp, tp and etp are 1 for now.
struct MeshShape {
  int pp = 1, dp = 1, cp = 1, tp = 1;
  int edp = 1, ep = 1, etp = 1;
  int world() const { return pp * dp * cp * tp; }
  bool operator==(const MeshShape&) const = default;
};

/// The divisor of n that is closest to x; of two, the larger.
int64_t nearest_divisor(int64_t n, int64_t x);

/// From the number of ranks and the chosen axes. Error(kUsage) that says why a layout is impossible and names the
/// nearest possible one.
MeshShape make_mesh_shape(int64_t world, int64_t pp, int64_t ep);

struct MeshPlace {
  int pp = 0, dp = 0, edp = 0, ep = 0;
};
MeshPlace place_of(const MeshShape& shape, int rank);
int rank_of(const MeshShape& shape, int pp, int dp);

// The groups of a rank, ascending; positions in them are the place's numbers.
std::vector<int> dp_group(const MeshShape& shape, int rank);   ///< reads other data, same stage
std::vector<int> ep_group(const MeshShape& shape, int rank);   ///< holds the other experts of the same layers
std::vector<int> edp_group(const MeshShape& shape, int rank);  ///< holds the same experts
std::vector<int> pp_group(const MeshShape& shape, int rank);   ///< the other stages, same data
/// First and last stage, same data: a tied embedding lives on both. Ranks of the stages between do not belong to it.
std::vector<int> embedding_group(const MeshShape& shape, int rank);

}  // namespace optimus
