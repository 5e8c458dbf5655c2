// Dense products by cuBLASLt. For CUDA sources only.
#pragma once

#include "optimus/ops/cuda/scratch.h"
#include "optimus/ops/ops.h"
#include "optimus/tensor/cuda/cuda_device.h"

namespace optimus::cuda {

/// The library's handle, and the algorithm chosen for each product seen so far.
class Matmuls {
 public:
  explicit Matmuls(CudaDevice& device);
  ~Matmuls();
  Matmuls(const Matmuls&) = delete;
  Matmuls& operator=(const Matmuls&) = delete;

  /// See Ops::matmul; M, N and K are at least 1.
  void run(Tensor a, Transpose ta, Tensor b, Transpose tb, Tensor y, Tensor addend, Scratch& scratch);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace optimus::cuda
