#include "optimus/ops/dry/dry_ops.h"

namespace optimus {

double DryOps::total_flops() const {
  double total = 0;
  for (const OpRecord& record : records_) total += record.flops;
  return total;
}

}  // namespace optimus
