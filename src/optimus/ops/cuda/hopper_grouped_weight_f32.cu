// dw (+)= dy^T x into f32: A = dy^T [N, rows], B = x^T [K, rows], both contiguous in their first dimension; the sum runs
// over the expert's rows.
#ifdef OPTIMUS_HOPPER_KERNELS
#include "optimus/ops/cuda/hopper_grouped.cuh"

namespace optimus::cuda {

std::unique_ptr<HopperProduct> make_hopper_weight_f32(int device, int multiprocessors) {
  return std::make_unique<HopperProductOf<MMajorA, NMajorB, float, float>>(device, multiprocessors);
}

}  // namespace optimus::cuda
#endif
