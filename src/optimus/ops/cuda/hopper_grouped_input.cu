// dx = dy w, rows grouped by expert: A = dy [rows, N], and B = w^T [K, N], of which the first dimension is contiguous.
#ifdef OPTIMUS_HOPPER_KERNELS
#include "optimus/ops/cuda/hopper_grouped.cuh"

namespace optimus::cuda {

std::unique_ptr<HopperProduct> make_hopper_input(int device, int multiprocessors) {
  return std::make_unique<HopperProductOf<KMajorA, NMajorB, void, cutlass::bfloat16_t>>(device, multiprocessors);
}

}  // namespace optimus::cuda
#endif
