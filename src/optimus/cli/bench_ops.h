// Every kernel of a step, one by one, against the machine's own ceilings.
#pragma once

#include <vector>

#include "optimus/ops/ops.h"
#include "optimus/train/config.h"

namespace optimus {

/// Of at least one value; of an even number the upper of the middle two.
double median(std::vector<double> values);

struct OpRow {
  std::string name, shape;
  double seconds, flops, bytes;  ///< of one call
};
struct OpsBenchResult {
  std::vector<OpRow> rows;            ///< the first two are the ceilings
  double flop_ceiling, byte_ceiling;  ///< FLOP/s and bytes/s
};

/// Cases whose name or shape contains `only` (empty: all).
OpsBenchResult bench_ops(const RunConfig& config, const std::string& only, Device& device, Ops& ops);

}  // namespace optimus
