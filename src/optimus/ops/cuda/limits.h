// What the memory plan must know of the GPU's kernels on a machine without one. No CUDA headers here.
#pragma once

#include "optimus/ops/ops.h"

namespace optimus::cuda {

/// Scratch of all kernels together, see scratch.h.
constexpr int64_t kScratchBytes = int64_t(64) << 20;

/// Whether cuDNN computes this attention: bf16, head_dim a multiple of 8 from 64 to 256, queries a multiple of 4 (what
/// the library puts first into its workspace, a float a query and head, then leaves the rest of it aligned), at most as
/// many as keys, and not a few: each length costs a new plan, and decoding lengthens the keys with every token. Rows
/// must also begin at multiples of 16 bytes, which the model's tensors then do.
bool attention_by_cudnn(const AttentionShape& shape, DType dtype);

/// What one call of cuDNN's backward takes: this many sequences with all their heads, or one sequence with this many
/// key/value heads and their query heads.
struct AttentionChunk {
  int64_t sequences, kv_heads;
};
/// The fewest calls, of about equal sizes, that each stay under kAttentionScratchLimit.
AttentionChunk attention_chunk(const AttentionShape& shape, bool deterministic);

/// Bytes of the `scratch` of attention_backward. A deterministic backward of cuDNN keeps a [queries, keys] matrix of
/// 2 bytes a head and sequence; it is then called for a chunk at a time, so that this stays under
/// kAttentionScratchLimit (unless one key/value head of one sequence needs more).
int64_t attention_scratch_bytes(const AttentionShape& shape, DType dtype, bool deterministic);
constexpr int64_t kAttentionScratchLimit = 2'200'000'000;

}  // namespace optimus::cuda
