#include "optimus/comm/mesh.h"

#include <cstdlib>
#include <limits>

#include "optimus/base/error.h"

namespace optimus {
namespace {

/// The ranks first, first + step, ...
std::vector<int> ranks_from(int first, int step, int count) {
  std::vector<int> ranks;
  ranks.reserve(size_t(count));
  for (int i = 0; i < count; ++i) ranks.push_back(first + i * step);
  return ranks;
}

}  // namespace

int64_t nearest_divisor(int64_t n, int64_t x) {
  int64_t nearest = 1;
  for (int64_t d = 2; d <= n; ++d)
    if (n % d == 0 && std::abs(d - x) <= std::abs(nearest - x)) nearest = d;
  return nearest;
}

MeshShape make_mesh_shape(int64_t world, int64_t pp, int64_t ep) {
  require(world >= 1 && world <= std::numeric_limits<int>::max(), ErrorKind::kUsage, "a layout for {} ranks", world);
  require(pp >= 1 && world % pp == 0, ErrorKind::kUsage,
          "pp = {} does not divide the {} ranks; the nearest that does is pp = {}", pp, world,
          nearest_divisor(world, pp));
  const int64_t dp = world / pp;
  require(ep >= 1 && dp % ep == 0, ErrorKind::kUsage,
          "ep = {} does not divide dp = {} ({} ranks / pp {}); the nearest that does is ep = {}", ep, dp, world, pp,
          nearest_divisor(dp, ep));
  MeshShape shape;
  shape.pp = int(pp);
  shape.dp = int(dp);
  shape.ep = int(ep);
  shape.edp = int(dp / ep);
  return shape;
}

MeshPlace place_of(const MeshShape& shape, int rank) {
  expects(rank >= 0 && rank < shape.world(), "rank {} of a mesh of {}", rank, shape.world());
  const int dp = rank % shape.dp;
  return {.pp = rank / shape.dp, .dp = dp, .edp = dp / shape.ep, .ep = dp % shape.ep};
}

int rank_of(const MeshShape& shape, int pp, int dp) {
  expects(pp >= 0 && pp < shape.pp && dp >= 0 && dp < shape.dp, "place pp {}, dp {} in a mesh of pp {}, dp {}", pp, dp,
          shape.pp, shape.dp);
  return pp * shape.dp + dp;
}

std::vector<int> dp_group(const MeshShape& shape, int rank) {
  return ranks_from(rank_of(shape, place_of(shape, rank).pp, 0), 1, shape.dp);
}

std::vector<int> ep_group(const MeshShape& shape, int rank) {
  const MeshPlace place = place_of(shape, rank);
  return ranks_from(rank_of(shape, place.pp, place.edp * shape.ep), 1, shape.ep);
}

std::vector<int> edp_group(const MeshShape& shape, int rank) {
  const MeshPlace place = place_of(shape, rank);
  return ranks_from(rank_of(shape, place.pp, place.ep), shape.ep, shape.edp);
}

std::vector<int> pp_group(const MeshShape& shape, int rank) {
  return ranks_from(place_of(shape, rank).dp, shape.dp, shape.pp);
}

std::vector<int> embedding_group(const MeshShape& shape, int rank) {
  const std::vector<int> stages = pp_group(shape, rank);
  if (stages.size() == 1) return stages;
  return {stages.front(), stages.back()};
}

}  // namespace optimus
