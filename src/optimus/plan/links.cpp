#include "optimus/plan/links.h"

#include <cmath>
#include <set>

#include "optimus/base/error.h"

namespace optimus {
namespace {

std::vector<int> members(const MeshShape& shape, int rank, const std::string& group) {
  if (group == "dp") return dp_group(shape, rank);
  if (group == "edp") return edp_group(shape, rank);
  if (group == "pp") return pp_group(shape, rank);
  if (group == "embedding") return embedding_group(shape, rank);
  expects(false, "no group is called {}", group);
  return {};
}

}  // namespace

Links::Links(const Hardware& hardware, const MeshShape& shape, int rank)
    : hardware_(hardware), shape_(shape), rank_(rank) {}

GroupPosition Links::position(const std::string& group) const {
  const int per_node = int(hardware_.devices_per_node.value);
  if (group == "world") return {shape_.world(), (shape_.world() + per_node - 1) / per_node};
  if (group == "ep") {
    int nodes = 1;
    const int first = rank_of(shape_, place_of(shape_, rank_).pp, 0);
    for (int begin = first; begin < first + shape_.dp; begin += shape_.ep)
      nodes = std::max(nodes, (begin + shape_.ep - 1) / per_node - begin / per_node + 1);
    return {shape_.ep, nodes};
  }
  const std::vector<int> ranks = members(shape_, rank_, group);
  std::set<int> nodes;
  for (int rank : ranks) nodes.insert(rank / per_node);
  return {int(ranks.size()), int(nodes.size())};
}

double Links::scatter_or_gather(const GroupPosition& group, double bytes) const {
  const double n = group.ranks, k = group.nodes, m = group.ranks_per_node();
  const double a = hardware_.node_latency.value, b = hardware_.network_latency.value;
  const double node = hardware_.node_bandwidth.value, network = hardware_.network_bandwidth.value;
  double slowest = 0;  // seconds a byte of the ring's links
  if (m > 1) slowest = 1 / node;
  if (k > 1) slowest = std::max(slowest, 1 / (m * network));
  const double ring = (n - k) * a + (k - 1) * b + bytes * slowest;
  const double halves =
      a * std::log2(m) + b * std::log2(k) + bytes / (n - 1) * ((n - n / m) / node + (n / m - 1) / network);
  return std::min(ring, halves);
}

double Links::all_to_all(const GroupPosition& group, double bytes) const {
  const double n = group.ranks, m = group.ranks_per_node();
  return hardware_.node_latency.value * std::log2(m) + hardware_.network_latency.value * std::log2(group.nodes) +
         bytes / (n - 1) *
             std::max((m - 1) / hardware_.node_bandwidth.value, (n - m) / hardware_.network_bandwidth.value);
}

// To a neighbouring stage.
double Links::send(double bytes) const {
  const bool inside = position("pp").nodes == 1;
  return inside ? hardware_.node_latency.value + bytes / hardware_.node_bandwidth.value
                : hardware_.network_latency.value + bytes / hardware_.network_bandwidth.value;
}

double Links::seconds(const MessageRecord& message) const {
  const double start = hardware_.collective_start.value;
  if (message.operation == "send") return start + send(message.bytes);
  const GroupPosition group = position(message.group);
  expects(group.ranks > 1, "{} in {}, a group of one", message.operation, message.group);
  if (message.operation == "all_reduce") return start + 2 * scatter_or_gather(group, message.bytes / 2);
  if (message.operation == "all_to_all") return start + all_to_all(group, message.bytes);
  expects(message.operation == "reduce_scatter" || message.operation == "all_gather", "no model of {}",
          message.operation);
  return start + scatter_or_gather(group, message.bytes);
}

}  // namespace optimus
