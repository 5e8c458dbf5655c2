// Attention: cuDNN's kernels where they fit, the portable ones elsewhere. Both keep the same lse (natural logarithm), so
// that a forward pass of one may be followed by a backward pass of the other.
#include "optimus/ops/cuda/cuda_ops.h"
#include "optimus/ops/cuda/cudnn_attention.h"
#include "optimus/ops/cuda/portable_attention.h"

namespace optimus::cuda {

void CudaOps::attention(const AttentionShape& shape, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse) {
  if (cudnn_->takes(shape, {q, k, v, o}) && cudnn_->forward(shape, q, k, v, o, lse, scratch_)) return;
  portable_attention(shape, q, k, v, o, lse, stream_);
}

void CudaOps::attention_backward(const AttentionShape& shape, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse,
                                 Tensor do_, Tensor dq, Tensor dk, Tensor dv, Tensor scratch) {
  if (cudnn_->takes(shape, {q, k, v, o, do_, dq, dk, dv}) &&
      cudnn_->backward(shape, q, k, v, o, lse, do_, dq, dk, dv, scratch))
    return;
  portable_attention_backward(shape, q, k, v, o, lse, do_, dq, dk, dv, scratch, stream_);
}

}  // namespace optimus::cuda
