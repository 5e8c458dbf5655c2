// y = x w^T, rows grouped by expert: A = x [rows, K], B = w [N, K], both with K contiguous.
#ifdef OPTIMUS_HOPPER_KERNELS
#include "optimus/ops/cuda/hopper_grouped.cuh"

namespace optimus::cuda {

std::unique_ptr<HopperProduct> make_hopper_forward(int device, int multiprocessors) {
  return std::make_unique<HopperProductOf<KMajorA, KMajorB, void, cutlass::bfloat16_t>>(device, multiprocessors);
}

}  // namespace optimus::cuda
#endif
