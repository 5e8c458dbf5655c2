// What the memory plan must know of the GPU's kernels on a machine without one. No CUDA headers here.
#pragma once

#include "optimus/ops/ops.h"

namespace optimus::cuda {

/// Scratch of all kernels together, see scratch.h.
constexpr int64_t kScratchBytes = int64_t(64) << 20;

/// Whether cuDNN computes this attention: bf16, head_dim a multiple of 8 from 64 to 256. Rows must also begin at
/// multiples of 16 bytes, which the model's tensors then do.
bool attention_by_cudnn(const AttentionShape& shape, DType dtype);

/// Bytes of the `scratch` of attention_backward. A deterministic backward of cuDNN keeps a [queries, keys] matrix of
/// 2 bytes a head and sequence; sequences are then taken in chunks, so that it stays under kAttentionScratchLimit.
int64_t attention_scratch_bytes(const AttentionShape& shape, DType dtype, bool deterministic);
constexpr int64_t kAttentionScratchLimit = 2'200'000'000;

}  // namespace optimus::cuda
