// How long messages take.
//
// A group of n ranks has m of them on each of k nodes (n = m k). A rank that sends B bytes takes, besides the time to
// start, for
//   reduce-scatter, all-gather  the faster of
//     a ring, which leaves a node once (so the m share that):  (n - k) a + (k - 1) b + B max(1/node, 1/(m network))
//     halves, inside the node first:                           a log2 m + b log2 k + B (n - n/m)/(n - 1) / node
//                                                                                  + B (n/m - 1)/(n - 1) / network
//   all-reduce                  both, with half of its bytes each
//   all-to-all                  a log2 m + b log2 k + B max((m - 1)/(n - 1) / node, (n - m)/(n - 1) / network)
//   send                        the latency of the link, and B over it
// with latencies a and b and bandwidths `node` and `network` inside and between nodes. All ranks of a node are taken to
// use the network at once, and nothing else to use a link meanwhile.
#pragma once

#include "optimus/comm/communicator.h"
#include "optimus/comm/mesh.h"
#include "optimus/plan/hardware.h"

namespace optimus {

/// Over how many nodes the ranks of a group spread.
struct GroupPosition {
  int ranks = 1, nodes = 1;
  double ranks_per_node() const { return double(ranks) / nodes; }
};

class Links {
 public:
  /// As the given rank sees its groups.
  Links(const Hardware& hardware, const MeshShape& shape, int rank);

  /// The group that messages call so: "dp", "ep", "edp", "pp", "world" or "embedding". Of the rank's stage the "ep"
  /// that spreads over most nodes, since the others wait for it: 8 neighbours do not always lie in one node of 12.
  GroupPosition position(const std::string& group) const;
  double seconds(const MessageRecord& message) const;

 private:
  double scatter_or_gather(const GroupPosition& group, double bytes) const;
  double all_to_all(const GroupPosition& group, double bytes) const;
  double send(double bytes) const;

  const Hardware& hardware_;
  MeshShape shape_;
  int rank_;
};

}  // namespace optimus
