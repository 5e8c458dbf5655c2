// Every kernel of a step, one by one, against the machine's own ceilings.
#pragma once

#include "optimus/cli/op_timer.h"

namespace optimus {

struct OpsBenchResult {
  Ceilings ceilings;
  std::vector<OpRow> rows;
};

/// Cases whose name or shape contains `only` (empty: all).
OpsBenchResult bench_ops(const RunConfig& config, const std::string& only, Device& device, Ops& ops);

}  // namespace optimus
