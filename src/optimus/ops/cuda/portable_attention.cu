// Attention by tiles of queries and keys, in f32 arithmetic for f32 and bf16: only a tile of scores exists at a time.
//
// Forward, a block of threads a tile of queries of one head, over the tiles of keys that it sees (online softmax):
//   s = scale q k^T;  m' = max(m, rowmax s);  p = e^(s - m');  l = l e^(m - m') + rowsum p;  o = o e^(m - m') + p v
// and finally o /= l, lse = m + ln l. Backward, with p = e^(s - lse) and delta = rowsum(do * o):
//   dv = p^T do;  ds = scale p * (do v^T - delta);  dq = ds k;  dk = ds^T q
// in two kernels: one a tile of queries, for delta and dq; then one a tile of keys of a key/value head, for dk and dv,
// which sums over the query heads of the group and the tiles of queries in one fixed order.
#include <type_traits>

#include "optimus/ops/cuda/attention_tiles.cuh"
#include "optimus/ops/cuda/portable_attention.h"

namespace optimus::cuda {
namespace {

using namespace tiles;

/// Rows of the tiles for heads of at most W columns, by what shared memory holds: `own` stays with the block, `other`
/// passes by. Everything fits the 99 KB of GPUs of compute capability 8.6, too.
template <int W>
struct ForwardTiles {
  static constexpr int kOwn = W <= 128 ? 64 : 32, kOther = W <= 64 ? 64 : W <= 128 ? 32 : 16;
  static constexpr int kFloats = (kOwn + 2 * kOther) * (W + kPad) + kOwn * (kOther + kPad);
};
template <int W>
struct BackwardTiles {
  static constexpr int kOwn = W <= 64 ? 64 : W <= 128 ? 32 : 16, kOther = W <= 128 ? 32 : 16;
  static constexpr int kHeads = 2 * (kOwn + kOther) * (W + kPad);
  static constexpr int kFloatsOfQueries = kHeads + kOwn * (kOther + kPad);
  static constexpr int kFloatsOfKeys = kHeads + 2 * kOther * (kOwn + kPad);
};

struct Sizes {
  int queries, keys, heads, kv_heads, head_dim;
  bool causal;
  float scale;

  __device__ int group() const { return heads / kv_heads; }
  /// One past the last key that query `query` sees.
  __device__ int visible_keys(int query) const { return causal ? min(keys, query + 1 + keys - queries) : keys; }
};

/// One past the last key that any of `rows` queries from `first` on sees.
__device__ int visible_keys_of(const Sizes& sizes, int first, int rows) {
  return rows > 0 ? sizes.visible_keys(first + rows - 1) : 0;
}

/// Blocks with the most tiles to pass come first: the last tile of queries, the first of keys.
struct Place {
  int tile, sequence, head;
};
__device__ Place place_of(int heads, int all_heads, int tiles, bool last_first) {
  const int rank = int(blockIdx.x) / all_heads, head = int(blockIdx.x) % all_heads;
  return {last_first ? tiles - 1 - rank : rank, head / heads, head % heads};
}

template <typename T, int W>
__global__ void __launch_bounds__(kThreads, 2)
    forward_kernel(Sizes sizes, int all_heads, int tiles, HeadRows<const T> q, HeadRows<const T> k, HeadRows<const T> v,
                   HeadRows<T> o, float* lse) {
  using Tiles = ForwardTiles<W>;
  constexpr int kRows = Tiles::kOwn / kSide, kColumns = Tiles::kOther / kSide;
  extern __shared__ float4 shared_memory[];
  float* q_tile = reinterpret_cast<float*>(shared_memory);
  float* k_tile = q_tile + Tiles::kOwn * (W + kPad);
  float* v_tile = k_tile + Tiles::kOther * (W + kPad);
  float* p_rows = v_tile + Tiles::kOther * (W + kPad) + thread_y() * kRows * (Tiles::kOther + kPad);

  const Place place = place_of(sizes.heads, all_heads, tiles, true);
  const int kv_head = place.head / sizes.group(), first_query = place.tile * Tiles::kOwn;
  const int rows = min(Tiles::kOwn, sizes.queries - first_query);
  const int64_t q_row = int64_t(place.sequence) * sizes.queries + first_query;
  const int64_t k_row = int64_t(place.sequence) * sizes.keys;
  load_tile<W, Tiles::kOwn>(q, q_row, place.head, rows, sizes.head_dim, q_tile);

  Result<W, kRows> result;
  result.clear();
  float maximum[kRows], sum[kRows];  // the sum over the thread's columns only, until the end
#pragma unroll
  for (int i = 0; i < kRows; ++i) maximum[i] = -INFINITY, sum[i] = 0.0f;

  const int keys = visible_keys_of(sizes, first_query, rows);
  for (int first_key = 0; first_key < keys; first_key += Tiles::kOther) {
    const int key_rows = min(Tiles::kOther, sizes.keys - first_key);
    __syncthreads();  // the tiles before have been used
    load_tile<W, Tiles::kOther>(k, k_row + first_key, kv_head, key_rows, sizes.head_dim, k_tile);
    load_tile<W, Tiles::kOther>(v, k_row + first_key, kv_head, key_rows, sizes.head_dim, v_tile);
    __syncthreads();
    float s[kRows][kColumns];
    multiply_rows<W>(q_tile + thread_y() * kRows * (W + kPad), k_tile + thread_x() * (W + kPad), s);
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int visible = sizes.visible_keys(first_query + thread_y() * kRows + i) - first_key - thread_x();
      float top = maximum[i];
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        s[i][j] = j * kSide < visible ? sizes.scale * s[i][j] : -INFINITY;
        top = fmaxf(top, s[i][j]);
      }
      top = reduce_row(top, Max{});
      const float correction = expf(maximum[i] - top);  // every row sees key 0: the maximum is finite
      maximum[i] = top;
      sum[i] *= correction;
      result.scale_row(i, correction);
#pragma unroll
      for (int j = 0; j < kColumns; ++j) {
        const float p = expf(s[i][j] - top);
        sum[i] += p;
        p_rows[i * (Tiles::kOther + kPad) + thread_x() + j * kSide] = p;
      }
    }
    __syncwarp();  // rows of p are shared by the lanes of one y only
    result.template add_product<Tiles::kOther>(p_rows, v_tile);
  }

#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const float total = reduce_row(sum[i], Sum{});
    const int row = thread_y() * kRows + i;
    result.scale_row(i, keys > 0 ? 1.0f / total : 0.0f);
    if (lse != nullptr && thread_x() == 0 && row < rows)
      lse[(int64_t(place.sequence) * sizes.heads + place.head) * sizes.queries + first_query + row] =
          maximum[i] + logf(total);
  }
  result.store(o, q_row, place.head, rows, sizes.head_dim);
}

/// p and ds of a tile from its scores and do v^T. Rows without a query get zeros.
template <int kRows, int kColumns>
__device__ void gradient_of_scores(const Sizes& sizes, int first_query, int first_key, const float (&lse)[kRows],
                                   const float (&delta)[kRows], float (&p)[kRows][kColumns],
                                   float (&ds)[kRows][kColumns]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int query = first_query + thread_y() * kRows + i;
    const int visible = query < sizes.queries ? sizes.visible_keys(query) - first_key - thread_x() : 0;
#pragma unroll
    for (int j = 0; j < kColumns; ++j) {
      const bool seen = j * kSide < visible;
      p[i][j] = seen ? expf(sizes.scale * p[i][j] - lse[i]) : 0.0f;
      ds[i][j] = seen ? sizes.scale * p[i][j] * (ds[i][j] - delta[i]) : 0.0f;
    }
  }
}

template <typename T, int W>
__global__ void __launch_bounds__(kThreads, 2)
    query_gradient_kernel(Sizes sizes, int all_heads, int tiles, HeadRows<const T> q, HeadRows<const T> k,
                          HeadRows<const T> v, HeadRows<const T> o, HeadRows<const T> do_, const float* lse,
                          float* delta, HeadRows<T> dq) {
  using Tiles = BackwardTiles<W>;
  constexpr int kRows = Tiles::kOwn / kSide, kColumns = Tiles::kOther / kSide;
  extern __shared__ float4 shared_memory[];
  float* q_tile = reinterpret_cast<float*>(shared_memory);
  float* do_tile = q_tile + Tiles::kOwn * (W + kPad);
  float* k_tile = do_tile + Tiles::kOwn * (W + kPad);
  float* v_tile = k_tile + Tiles::kOther * (W + kPad);
  float* ds_rows = v_tile + Tiles::kOther * (W + kPad) + thread_y() * kRows * (Tiles::kOther + kPad);

  const Place place = place_of(sizes.heads, all_heads, tiles, true);
  const int kv_head = place.head / sizes.group(), first_query = place.tile * Tiles::kOwn;
  const int rows = min(Tiles::kOwn, sizes.queries - first_query);
  const int64_t q_row = int64_t(place.sequence) * sizes.queries + first_query;
  const int64_t k_row = int64_t(place.sequence) * sizes.keys;
  const int64_t statistic = (int64_t(place.sequence) * sizes.heads + place.head) * sizes.queries + first_query;
  load_tile<W, Tiles::kOwn>(q, q_row, place.head, rows, sizes.head_dim, q_tile);
  load_tile<W, Tiles::kOwn>(do_, q_row, place.head, rows, sizes.head_dim, do_tile);
  __syncthreads();

  float row_lse[kRows], row_delta[kRows];
#pragma unroll
  for (int i = 0; i < kRows; ++i) {
    const int row = thread_y() * kRows + i;
    float sum = 0.0f;
    if (row < rows) {
      const T* o_row = o[q_row + row] + int64_t(place.head) * sizes.head_dim;
      for (int column = thread_x(); column < sizes.head_dim; column += kSide)
        sum = fmaf(do_tile[row * (W + kPad) + column], to_float(o_row[column]), sum);
    }
    row_delta[i] = reduce_row(sum, Sum{});
    row_lse[i] = row < rows ? lse[statistic + row] : 0.0f;
    if (row < rows && thread_x() == 0) delta[statistic + row] = row_delta[i];
  }

  Result<W, kRows> result;
  result.clear();
  const int keys = visible_keys_of(sizes, first_query, rows);
  for (int first_key = 0; first_key < keys; first_key += Tiles::kOther) {
    const int key_rows = min(Tiles::kOther, sizes.keys - first_key);
    __syncthreads();  // the tiles before have been used
    load_tile<W, Tiles::kOther>(k, k_row + first_key, kv_head, key_rows, sizes.head_dim, k_tile);
    load_tile<W, Tiles::kOther>(v, k_row + first_key, kv_head, key_rows, sizes.head_dim, v_tile);
    __syncthreads();
    float p[kRows][kColumns], ds[kRows][kColumns];
    const int own = thread_y() * kRows * (W + kPad), other = thread_x() * (W + kPad);
    multiply_rows<W>(q_tile + own, k_tile + other, p);
    multiply_rows<W>(do_tile + own, v_tile + other, ds);
    gradient_of_scores(sizes, first_query, first_key, row_lse, row_delta, p, ds);
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int j = 0; j < kColumns; ++j) ds_rows[i * (Tiles::kOther + kPad) + thread_x() + j * kSide] = ds[i][j];
    __syncwarp();  // rows of ds are shared by the lanes of one y only
    result.template add_product<Tiles::kOther>(ds_rows, k_tile);
  }
  result.store(dq, q_row, place.head, rows, sizes.head_dim);
}

template <typename T, int W>
__global__ void __launch_bounds__(kThreads, 2)
    key_gradient_kernel(Sizes sizes, int all_kv_heads, int tiles, HeadRows<const T> q, HeadRows<const T> k,
                        HeadRows<const T> v, HeadRows<const T> do_, const float* lse, const float* delta,
                        HeadRows<T> dk, HeadRows<T> dv) {
  using Tiles = BackwardTiles<W>;
  constexpr int kRows = Tiles::kOther / kSide, kColumns = Tiles::kOwn / kSide;  // of scores: queries by keys
  constexpr int kScorePitch = Tiles::kOwn + kPad;
  extern __shared__ float4 shared_memory[];
  float* k_tile = reinterpret_cast<float*>(shared_memory);
  float* v_tile = k_tile + Tiles::kOwn * (W + kPad);
  float* q_tile = v_tile + Tiles::kOwn * (W + kPad);
  float* do_tile = q_tile + Tiles::kOther * (W + kPad);
  float* p_tile = do_tile + Tiles::kOther * (W + kPad);
  float* ds_tile = p_tile + Tiles::kOther * kScorePitch;

  const Place place = place_of(sizes.kv_heads, all_kv_heads, tiles, false);
  const int first_key = place.tile * Tiles::kOwn, rows = min(Tiles::kOwn, sizes.keys - first_key);
  const int64_t k_row = int64_t(place.sequence) * sizes.keys + first_key;
  load_tile<W, Tiles::kOwn>(k, k_row, place.head, rows, sizes.head_dim, k_tile);
  load_tile<W, Tiles::kOwn>(v, k_row, place.head, rows, sizes.head_dim, v_tile);

  Result<W, kColumns> dk_result, dv_result;
  dk_result.clear();
  dv_result.clear();
  // The first query that sees the first of the keys, and its tile.
  const int first_seen = sizes.causal ? max(0, first_key - (sizes.keys - sizes.queries)) : 0;
  const int first_tile = first_seen / Tiles::kOther * Tiles::kOther;
  for (int head = place.head * sizes.group(); head < (place.head + 1) * sizes.group(); ++head) {
    const int64_t statistic = (int64_t(place.sequence) * sizes.heads + head) * sizes.queries;
    for (int first_query = first_tile; first_query < sizes.queries; first_query += Tiles::kOther) {
      const int query_rows = min(Tiles::kOther, sizes.queries - first_query);
      const int64_t q_row = int64_t(place.sequence) * sizes.queries + first_query;
      __syncthreads();  // the tiles before have been used
      load_tile<W, Tiles::kOther>(q, q_row, head, query_rows, sizes.head_dim, q_tile);
      load_tile<W, Tiles::kOther>(do_, q_row, head, query_rows, sizes.head_dim, do_tile);
      float row_lse[kRows], row_delta[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) {
        const int query = first_query + thread_y() * kRows + i;
        row_lse[i] = query < sizes.queries ? lse[statistic + query] : 0.0f;
        row_delta[i] = query < sizes.queries ? delta[statistic + query] : 0.0f;
      }
      __syncthreads();
      float p[kRows][kColumns], ds[kRows][kColumns];
      const int other = thread_y() * kRows * (W + kPad), own = thread_x() * (W + kPad);
      multiply_rows<W>(q_tile + other, k_tile + own, p);
      multiply_rows<W>(do_tile + other, v_tile + own, ds);
      gradient_of_scores(sizes, first_query, first_key, row_lse, row_delta, p, ds);
#pragma unroll
      for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int j = 0; j < kColumns; ++j) {
          const int at = (thread_y() * kRows + i) * kScorePitch + thread_x() + j * kSide;
          p_tile[at] = p[i][j];
          ds_tile[at] = ds[i][j];
        }
      __syncthreads();
      dv_result.template add_transposed_product<Tiles::kOther>(p_tile + thread_y() * kColumns, do_tile);
      dk_result.template add_transposed_product<Tiles::kOther>(ds_tile + thread_y() * kColumns, q_tile);
    }
  }
  dk_result.store(dk, k_row, place.head, rows, sizes.head_dim);
  dv_result.store(dv, k_row, place.head, rows, sizes.head_dim);
}

/// visitor(integral constant W), the least width that holds a head.
template <typename Visitor>
void with_width(int64_t head_dim, Visitor&& visitor) {
  expects(head_dim >= 1 && head_dim <= 256, "attention with heads of {} columns, at most 256", head_dim);
  if (head_dim <= 32) return visitor(std::integral_constant<int, 32>{});
  if (head_dim <= 64) return visitor(std::integral_constant<int, 64>{});
  if (head_dim <= 128) return visitor(std::integral_constant<int, 128>{});
  visitor(std::integral_constant<int, 256>{});
}

Sizes sizes_of(const AttentionShape& shape) {
  constexpr int64_t kMost = int64_t(1) << 30;
  expects(shape.queries < kMost && shape.keys < kMost && shape.sequences * shape.heads < kMost,
          "attention of {} queries, {} keys, {} sequences and {} heads", shape.queries, shape.keys, shape.sequences,
          shape.heads);
  return {int(shape.queries),  int(shape.keys), int(shape.heads), int(shape.kv_heads),
          int(shape.head_dim), shape.causal,    shape.scale};
}

/// A block for each tile of `kOwn` positions of each head of each sequence.
template <int kOwn, typename... Parameters, typename... Arguments>
void launch_tiles(void (*kernel)(Sizes, int, int, Parameters...), const AttentionShape& shape, int64_t heads,
                  int64_t positions, int floats, cudaStream_t stream, Arguments&&... arguments) {
  const int64_t tiles = ceil_div(positions, kOwn), all_heads = shape.sequences * heads;
  if (tiles * all_heads == 0) return;
  const int shared_bytes = floats * int(sizeof(float));
  if (shared_bytes > 48 * 1024)  // more than a kernel may use without asking
    OPTIMUS_CUDA(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, shared_bytes));
  launch(kernel, tiles * all_heads, kThreads, size_t(shared_bytes), stream, sizes_of(shape), int(all_heads), int(tiles),
         arguments...);
}

}  // namespace

void portable_attention(const AttentionShape& shape, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse,
                        cudaStream_t stream) {
  const int64_t head_dim = shape.head_dim;
  with_real(q.dtype, [&]<typename T>(T) {
    with_width(head_dim, [&]<int W>(std::integral_constant<int, W>) {
      using Tiles = ForwardTiles<W>;
      launch_tiles<Tiles::kOwn>(forward_kernel<T, W>, shape, shape.heads, shape.queries, Tiles::kFloats, stream,
                                HeadRows<const T>(q, head_dim), HeadRows<const T>(k, head_dim),
                                HeadRows<const T>(v, head_dim), HeadRows<T>(o, head_dim), pointer<float>(lse));
    });
  });
}

void portable_attention_backward(const AttentionShape& shape, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse,
                                 Tensor do_, Tensor dq, Tensor dk, Tensor dv, Tensor scratch, cudaStream_t stream) {
  const int64_t head_dim = shape.head_dim;
  expects(scratch.elements() * int64_t(bool(scratch)) >= shape.sequences * shape.heads * shape.queries,
          "attention's backward was given {} floats of scratch", scratch.elements());
  float* delta = pointer<float>(scratch);
  with_real(q.dtype, [&]<typename T>(T) {
    with_width(head_dim, [&]<int W>(std::integral_constant<int, W>) {
      using Tiles = BackwardTiles<W>;
      const HeadRows<const T> q_rows(q, head_dim), k_rows(k, head_dim), v_rows(v, head_dim), do_rows(do_, head_dim);
      launch_tiles<Tiles::kOwn>(query_gradient_kernel<T, W>, shape, shape.heads, shape.queries, Tiles::kFloatsOfQueries,
                                stream, q_rows, k_rows, v_rows, HeadRows<const T>(o, head_dim), do_rows,
                                pointer<const float>(lse), delta, HeadRows<T>(dq, head_dim));
      launch_tiles<Tiles::kOwn>(key_gradient_kernel<T, W>, shape, shape.kv_heads, shape.keys, Tiles::kFloatsOfKeys,
                                stream, q_rows, k_rows, v_rows, do_rows, pointer<const float>(lse),
                                static_cast<const float*>(delta), HeadRows<T>(dk, head_dim), HeadRows<T>(dv, head_dim));
    });
  });
}

}  // namespace optimus::cuda
