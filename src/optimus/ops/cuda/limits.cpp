#include "optimus/ops/cuda/limits.h"

#include <algorithm>

namespace optimus::cuda {

bool attention_by_cudnn(const AttentionShape& shape, DType dtype) {
  return dtype == DType::bf16 && shape.head_dim % 8 == 0 && shape.head_dim >= 64 && shape.head_dim <= 256;
}

int64_t attention_scratch_bytes(const AttentionShape& shape, DType dtype, bool deterministic) {
  const int64_t heads = shape.sequences * shape.heads;
  if (!attention_by_cudnn(shape, dtype)) return heads * shape.queries * 4;  // rowsum(do * o)
  (void)deterministic;
  return heads * shape.queries * 4;
}

}  // namespace optimus::cuda
