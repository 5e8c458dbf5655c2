#include "optimus/ops/cuda/limits.h"

#include <algorithm>

namespace optimus::cuda {
namespace {

constexpr int64_t kFewQueries = 16;
constexpr int64_t kAttentionTile = 128;                 // of queries and keys, what cuDNN rounds lengths up to at most
constexpr int64_t kAttentionMargin = int64_t(2) << 20;  // counters, alignment

int64_t round_up(int64_t x, int64_t to) { return (x + to - 1) / to * to; }
int64_t ceil_div(int64_t x, int64_t by) { return (x + by - 1) / by; }

// Of one key/value head of one sequence, with its query heads. The backward graph holds rowsum(do * o) in f32; then
// either the matrix dS in bf16 (deterministic: dQ is a product with it) or dQ in f32 (added to in any order); and where
// query heads share a key/value head, dK and dV of each query head before they are summed: in bf16 as of cuDNN 9.19,
// taken as f32 here.
int64_t workspace_bytes_of_a_kv_head(const AttentionShape& shape, bool deterministic) {
  const int64_t queries = round_up(shape.queries, kAttentionTile), keys = round_up(shape.keys, kAttentionTile);
  const int64_t group = shape.heads / shape.kv_heads;
  const int64_t sums = queries * 4;
  const int64_t dq = deterministic ? queries * keys * 2 : queries * shape.head_dim * 4;
  const int64_t shared_heads = group > 1 ? 2 * keys * shape.head_dim * 4 : 0;
  return group * (sums + dq + shared_heads);
}

// `count` things in the fewest parts of at most `most`, all but the last of one size.
int64_t even_part(int64_t count, int64_t most) {
  return most >= count ? count : ceil_div(count, ceil_div(count, std::max<int64_t>(most, 1)));
}

}  // namespace

bool attention_by_cudnn(const AttentionShape& shape, DType dtype) {
  return dtype == DType::bf16 && shape.head_dim % 8 == 0 && shape.head_dim >= 64 && shape.head_dim <= 256 &&
         shape.queries % 4 == 0 && shape.queries >= kFewQueries && shape.keys >= shape.queries && shape.sequences > 0;
}

AttentionChunk attention_chunk(const AttentionShape& shape, bool deterministic) {
  const int64_t kv_head_bytes = workspace_bytes_of_a_kv_head(shape, deterministic);
  const int64_t limit = kAttentionScratchLimit - kAttentionMargin;
  const int64_t sequences = limit / (kv_head_bytes * shape.kv_heads);
  if (sequences >= 1) return {even_part(shape.sequences, sequences), shape.kv_heads};
  return {1, even_part(shape.kv_heads, limit / kv_head_bytes)};
}

int64_t attention_scratch_bytes(const AttentionShape& shape, DType dtype, bool deterministic) {
  const int64_t portable = shape.sequences * shape.heads * shape.queries * 4;  // rowsum(do * o)
  if (!attention_by_cudnn(shape, dtype)) return portable;
  const AttentionChunk chunk = attention_chunk(shape, deterministic);
  const int64_t kv_head_bytes = workspace_bytes_of_a_kv_head(shape, deterministic);
  // A library that wants more than is thought here gets smaller chunks; the smallest has room to spare.
  const int64_t smallest = kv_head_bytes + std::min(kv_head_bytes, kAttentionScratchLimit / 8);
  const int64_t chunk_bytes = std::max(chunk.sequences * chunk.kv_heads * kv_head_bytes, smallest);
  return std::max(portable, round_up(chunk_bytes + kAttentionMargin, 256));
}

}  // namespace optimus::cuda
