// What a build without CUDA answers; make_cuda_device() has refused before.
#include "optimus/ops/ops.h"

namespace optimus {

std::unique_ptr<Ops> make_cuda_ops(Device&, bool) {
  throw std::logic_error("a build without CUDA has no such kernels");
}

}  // namespace optimus
