// TCP connections in a ring between the processes of a run.
#pragma once

#include <functional>
#include <string>
#include <vector>

namespace optimus {

struct RingSockets {
  int next = -1;      ///< to rank + 1, and from the last rank to the first
  int previous = -1;  ///< from rank - 1
};

/// Connects rank `rank` of `size` > 1 with its neighbours; `exchange` gives all ranks' texts to all of them. The sockets
/// do not block and are closed in programs that this one executes; the caller closes them. Collective.
/// Error(kCommunication) where a neighbour cannot be reached within 30 s.
RingSockets connect_ring(int rank, int size,
                         const std::function<std::vector<std::string>(const std::string& mine)>& exchange);

}  // namespace optimus
