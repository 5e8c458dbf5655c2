// The [parallel] section: how the ranks share the work. A layout is not semantics: it changes where and when, never what.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace optimus {

struct ParallelConfig {
  int64_t pp = 1, tp = 1, cp = 1, ep = 1, etp = 1;
  std::string dispatcher = "auto";
  std::string schedule = "1f1b";
  int64_t virtual_stages = 1;
  std::vector<int64_t> stage_layers;

  template <typename V>
  void fields(V& v) {
    v("pp", pp);
    v("tp", tp);
    v("cp", cp);
    v("ep", ep);
    v("etp", etp);
    v("dispatcher", dispatcher, {"auto", "allgather", "alltoall"});
    v("schedule", schedule, {"gpipe", "1f1b", "interleaved", "zero_bubble"});
    v("virtual_stages", virtual_stages);
    v("stage_layers", stage_layers);
  }
};

}  // namespace optimus
