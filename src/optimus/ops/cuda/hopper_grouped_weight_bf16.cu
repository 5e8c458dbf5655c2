// dw (+)= dy^T x into bf16: A = dy^T [N, rows], B = x^T [K, rows], both contiguous in their first dimension; the sum runs
// over the expert's rows.
#ifdef OPTIMUS_HOPPER_KERNELS
#include "optimus/ops/cuda/hopper_grouped.cuh"

namespace optimus::cuda {

std::unique_ptr<HopperProduct> make_hopper_weight_bf16(int device, int multiprocessors) {
  return std::make_unique<HopperProductOf<MMajorA, NMajorB, cutlass::bfloat16_t, cutlass::bfloat16_t>>(device,
                                                                                                       multiprocessors);
}

}  // namespace optimus::cuda
#endif
