// Attention by cuDNN's graph API. For CUDA sources only.
#pragma once

#include <initializer_list>

#include "optimus/ops/cuda/scratch.h"
#include "optimus/ops/ops.h"
#include "optimus/tensor/cuda/cuda_device.h"

namespace optimus::cuda {

/// The library's handle, made when it is first needed, and a plan for each shape seen so far.
class CudnnAttention {
 public:
  /// Throws Error(kUsage) where the library is missing or older than the headers of the build.
  CudnnAttention(CudaDevice& device, bool deterministic);
  ~CudnnAttention();
  CudnnAttention(const CudnnAttention&) = delete;
  CudnnAttention& operator=(const CudnnAttention&) = delete;

  /// Whether cuDNN computes this one, see limits.h; also looks at the alignment of the matrices (all but lse) and at the
  /// library's known faults.
  bool takes(const AttentionShape& shape, std::initializer_list<Tensor> matrices) const;
  /// False, and nothing done that counts, where the library has no plan for this shape.
  [[nodiscard]] bool forward(const AttentionShape& shape, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse,
                             Scratch& scratch);
  /// `workspace` as attention_scratch_bytes() says.
  [[nodiscard]] bool backward(const AttentionShape& shape, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse,
                              Tensor do_, Tensor dq, Tensor dk, Tensor dv, Tensor workspace);

 private:
  struct State;
  std::unique_ptr<State> state_;
};

}  // namespace optimus::cuda
