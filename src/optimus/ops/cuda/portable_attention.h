// Attention by own kernels, for what cuDNN does not compute: f32, small or odd head_dim, odd lengths, few queries. For
// CUDA sources only.
#pragma once

#include <cuda_runtime_api.h>

#include "optimus/ops/ops.h"

namespace optimus::cuda {

/// See Ops::attention; head_dim is at most 256.
void portable_attention(const AttentionShape& shape, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse,
                        cudaStream_t stream);
/// See Ops::attention_backward; `scratch` holds a float for each (sequence, head, query).
void portable_attention_backward(const AttentionShape& shape, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse,
                                 Tensor do_, Tensor dq, Tensor dk, Tensor dv, Tensor scratch, cudaStream_t stream);

}  // namespace optimus::cuda
