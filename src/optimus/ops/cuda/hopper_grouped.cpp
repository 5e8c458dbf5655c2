// What the log says of grouped products: once of each kind, which way it goes. Not in a CUDA source, whose compiler does
// not take the log's headers.
#include "optimus/ops/cuda/hopper_grouped.h"

#include "optimus/base/log.h"

namespace optimus::cuda {

void GroupedKernels::tell(const char* product, DType in, DType out, const char* obstacle) {
  if (!told.emplace(product, in, out, obstacle).second) return;
  if (obstacle == nullptr) log().info("grouped {}, {} to {}: CUTLASS kernel", product, name_of(in), name_of(out));
  else log().info("grouped {}, {} to {}: portable kernel ({})", product, name_of(in), name_of(out), obstacle);
}

}  // namespace optimus::cuda
