// Attention by blocks of queries and keys: only one block of scores exists at a time.
//
// Forward, for a block of queries, over blocks of keys with running maximum m and sum l (online softmax):
//   s = scale q k^T;  m' = max(m, rowmax s);  p = e^(s - m');  l = l e^(m - m') + rowsum p;  o = o e^(m - m') + p v
// and finally o /= l, lse = m + ln l. Backward, with p = e^(s - lse) and delta = rowsum(do * o):
//   dv += p^T do;  ds = scale p * (do v^T - delta);  dq += ds k;  dk += ds^T q
// Forward has one task a (sequence, query head), backward one a (sequence, key head), which owns dk and dv and adds
// to them in a fixed order. bf16 heads are converted to f32 in the task's scratch. Key blocks end at the last key that
// a query block may see, so that of a causal square little more than its lower half is computed.
#include <cmath>
#include <limits>
#include <type_traits>

#include "optimus/ops/cpu/cpu_ops.h"
#include "optimus/ops/cpu/vector_math.h"

namespace optimus::cpu {
namespace {

constexpr int64_t kQueryBlock = 64;
constexpr int64_t kKeyBlock = 256;
constexpr int64_t kVector = 16;  // of f32; divides kKeyBlock

/// An f32 matrix of W columns: part of a tensor, or a copy.
struct Matrix {
  float* data;
  int64_t pitch;
  float* row(int64_t r) const { return data + r * pitch; }
};

/// One head's columns of `rows` rows of a tensor.
template <typename T>
struct Head {
  Head(const Tensor& tensor, int64_t first_row, int64_t head, int64_t head_dim)
      : data(tensor.as<T>() + first_row * tensor.pitch + head * head_dim), pitch(tensor.pitch), width(head_dim) {}

  /// The rows in f32: in place, or copied to `scratch`.
  Matrix load(int64_t rows, float* scratch) const {
    const Matrix target = result(scratch);
    if constexpr (!std::is_same_v<T, float>) {
      for (int64_t r = 0; r < rows; ++r) {
        const T* from = data + r * pitch;
        float* to = target.row(r);
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) to[i] = float(from[i]);
      }
    }
    return target;
  }
  /// Where f32 results go: in place, or to `scratch` until round() stores them.
  Matrix result(float* scratch) const {
    if constexpr (std::is_same_v<T, float>) return {data, pitch};
    else return {scratch, width};
  }
  void round(const Matrix& from, int64_t rows) const {
    if constexpr (!std::is_same_v<T, float>) {
      for (int64_t r = 0; r < rows; ++r) {
        const float* row = from.row(r);
        T* to = data + r * pitch;
#pragma omp simd
        for (int64_t i = 0; i < width; ++i) store(to[i], row[i]);
      }
    }
  }
  Head rows_from(int64_t row) const {
    Head part = *this;
    part.data += row * pitch;
    return part;
  }

  T* data;
  int64_t pitch, width;
};

/// c[m,n] (+)= alpha * op(a) op(b).
void multiply(const Matrix& a, Transpose ta, const Matrix& b, Transpose tb, const Matrix& c, int64_t m, int64_t n,
              int64_t k, bool accumulate, float alpha = 1.0f) {
  sgemm({ta, tb, m, n, k, a.data, a.pitch, b.data, b.pitch, c.data, c.pitch, accumulate}, alpha);
}

/// One past the last key that query `query` sees.
int64_t visible_keys(const AttentionShape& shape, int64_t query) {
  return shape.causal ? query + 1 + shape.keys - shape.queries : shape.keys;
}

/// Calls block(first query, queries, first key, keys) in order, leaving out what no query of a block sees.
template <typename F>
void for_each_block(const AttentionShape& shape, int64_t query, int64_t queries, F&& block) {
  const int64_t keys = visible_keys(shape, query + queries - 1);
  for (int64_t key = 0; key < keys; key += kKeyBlock) block(key, std::min(kKeyBlock, keys - key));
}

struct RowState {
  float maximum, sum;
};

/// Hides the scores past `visible` behind -inf up to a whole number of vectors, and returns that number of columns: a
/// causal row ends anywhere, and g++ computes what is left of a vector one by one. Rows of scores have room for it.
int64_t mask_row(float* scores, int64_t visible) {
  const int64_t padded = ceil_div(visible, kVector) * kVector;
  std::fill(scores + visible, scores + padded, -std::numeric_limits<float>::infinity());
  return padded;
}

/// Turns a row's scores into probabilities relative to the running maximum; returns the factor for what came before.
float softmax_step(float* scores, int64_t visible, int64_t keys, RowState& state) {
  const int64_t padded = mask_row(scores, visible);
  float maximum = state.maximum;
#pragma omp simd reduction(max : maximum)
  for (int64_t i = 0; i < padded; ++i) maximum = scores[i] > maximum ? scores[i] : maximum;
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t i = 0; i < padded; ++i) {
    scores[i] = fast_exp(scores[i] - maximum);
    sum += scores[i];
  }
  if (padded < keys) std::fill(scores + padded, scores + keys, 0.0f);
  const float correction = fast_exp(state.maximum - maximum);
  state = {maximum, state.sum * correction + sum};
  return correction;
}

void scale_row(float* row, int64_t width, float factor) {
#pragma omp simd
  for (int64_t i = 0; i < width; ++i) row[i] *= factor;
}

}  // namespace

void CpuOps::attention(const AttentionShape& shape, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse) {
  const int64_t width = shape.head_dim, queries = shape.queries, keys = shape.keys;
  if (queries == 0 || shape.sequences == 0) return;
  const int64_t copies = q.dtype == DType::f32 ? 0 : (2 * keys + 2 * kQueryBlock) * width;
  const int64_t scratch_each = kQueryBlock * kKeyBlock + copies;
  float* scratch = scratch_.request<float>(scratch_each * omp_get_max_threads());

  with_real(q.dtype, [&]<typename T>(T) {
    parallel_tasks(shape.sequences * shape.heads, queries * keys * width, [&](int64_t task) {
      const int64_t sequence = task / shape.heads, head = task % shape.heads;
      const int64_t kv_head = head / (shape.heads / shape.kv_heads);
      float* mine = scratch + omp_get_thread_num() * scratch_each;
      const Matrix scores{mine, kKeyBlock};
      float* copied = mine + kQueryBlock * kKeyBlock;
      const Matrix key = Head<T>(k, sequence * keys, kv_head, width).load(keys, copied);
      const Matrix value = Head<T>(v, sequence * keys, kv_head, width).load(keys, copied + keys * width);
      const Head<T> query_head(q, sequence * queries, head, width), output_head(o, sequence * queries, head, width);
      float* block_copies = copied + 2 * keys * width;

      for (int64_t first = 0; first < queries; first += kQueryBlock) {
        const int64_t count = std::min(kQueryBlock, queries - first);
        const Matrix query = query_head.rows_from(first).load(count, block_copies);
        const Matrix output = output_head.rows_from(first).result(block_copies + kQueryBlock * width);
        RowState states[kQueryBlock];
        std::fill_n(states, count, RowState{-std::numeric_limits<float>::infinity(), 0.0f});
        for_each_block(shape, first, count, [&](int64_t first_key, int64_t key_count) {
          multiply(query, Transpose::no, {key.row(first_key), key.pitch}, Transpose::yes, scores, count, key_count,
                   width, false, shape.scale);
          for (int64_t r = 0; r < count; ++r) {
            const int64_t visible = std::clamp<int64_t>(visible_keys(shape, first + r) - first_key, 0, key_count);
            const float correction = softmax_step(scores.row(r), visible, key_count, states[r]);
            if (first_key > 0) scale_row(output.row(r), width, correction);
          }
          multiply(scores, Transpose::no, {value.row(first_key), value.pitch}, Transpose::no, output, count, width,
                   key_count, first_key > 0);
        });
        for (int64_t r = 0; r < count; ++r) {
          scale_row(output.row(r), width, 1.0f / states[r].sum);
          if (lse) lse.as<float>()[task * queries + first + r] = states[r].maximum + std::log(states[r].sum);
        }
        output_head.rows_from(first).round(output, count);
      }
    });
  });
}

int64_t CpuOps::attention_scratch_bytes(const AttentionShape&, DType) const { return 0; }

void CpuOps::attention_backward(const AttentionShape& shape, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse,
                                Tensor do_, Tensor dq, Tensor dk, Tensor dv, Tensor) {
  const int64_t width = shape.head_dim, queries = shape.queries, keys = shape.keys;
  if (queries == 0 || shape.sequences == 0) return;
  const int64_t group = shape.heads / shape.kv_heads;
  const int64_t copies = q.dtype == DType::f32 ? 0 : (4 * keys + 3 * kQueryBlock) * width;
  const int64_t scratch_each = 2 * kQueryBlock * kKeyBlock + copies;
  float* scratch = scratch_.request<float>(scratch_each * omp_get_max_threads());

  with_real(q.dtype, [&]<typename T>(T) {
    parallel_tasks(shape.sequences * shape.kv_heads, group * queries * keys * width, [&](int64_t task) {
      const int64_t sequence = task / shape.kv_heads, kv_head = task % shape.kv_heads;
      float* mine = scratch + omp_get_thread_num() * scratch_each;
      const Matrix p{mine, kKeyBlock}, ds{mine + kQueryBlock * kKeyBlock, kKeyBlock};
      float* copied = mine + 2 * kQueryBlock * kKeyBlock;
      const auto next_copy = [&](int64_t rows) {
        float* copy = copied;
        if constexpr (!std::is_same_v<T, float>) copied += rows * width;
        return copy;
      };
      const Matrix key = Head<T>(k, sequence * keys, kv_head, width).load(keys, next_copy(keys));
      const Matrix value = Head<T>(v, sequence * keys, kv_head, width).load(keys, next_copy(keys));
      const Head<T> dkey_head(dk, sequence * keys, kv_head, width), dvalue_head(dv, sequence * keys, kv_head, width);
      const Matrix dkey = dkey_head.result(next_copy(keys)), dvalue = dvalue_head.result(next_copy(keys));
      for (int64_t r = 0; r < keys; ++r) {
        std::fill_n(dkey.row(r), width, 0.0f);
        std::fill_n(dvalue.row(r), width, 0.0f);
      }
      float* query_copy = next_copy(kQueryBlock);
      float* doutput_copy = next_copy(kQueryBlock);
      float* dquery_copy = next_copy(kQueryBlock);

      for (int64_t head = kv_head * group; head < (kv_head + 1) * group; ++head) {
        const Head<T> query_head(q, sequence * queries, head, width), dquery_head(dq, sequence * queries, head, width);
        const Head<T> output_head(o, sequence * queries, head, width);
        const Head<T> doutput_head(do_, sequence * queries, head, width);
        for (int64_t first = 0; first < queries; first += kQueryBlock) {
          const int64_t count = std::min(kQueryBlock, queries - first);
          const Matrix query = query_head.rows_from(first).load(count, query_copy);
          const Matrix doutput = doutput_head.rows_from(first).load(count, doutput_copy);
          const Matrix dquery = dquery_head.rows_from(first).result(dquery_copy);
          const float* row_lses = lse.as<float>() + (sequence * shape.heads + head) * queries + first;
          float row_deltas[kQueryBlock];
          for (int64_t r = 0; r < count; ++r) {
            const T* output = output_head.rows_from(first + r).data;
            const float* gradient = doutput.row(r);
            float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
            for (int64_t i = 0; i < width; ++i) sum += gradient[i] * float(output[i]);
            row_deltas[r] = sum;
          }
          for_each_block(shape, first, count, [&](int64_t first_key, int64_t key_count) {
            const Matrix key_block{key.row(first_key), key.pitch}, value_block{value.row(first_key), value.pitch};
            multiply(query, Transpose::no, key_block, Transpose::yes, p, count, key_count, width, false, shape.scale);
            multiply(doutput, Transpose::no, value_block, Transpose::yes, ds, count, key_count, width, false);
            for (int64_t r = 0; r < count; ++r) {
              const int64_t visible = std::clamp<int64_t>(visible_keys(shape, first + r) - first_key, 0, key_count);
              const float row_lse = row_lses[r];
              const float scale = shape.scale;
              const float row_delta = row_deltas[r];
              float* p_row = p.row(r);
              float* ds_row = ds.row(r);
              const int64_t padded = mask_row(p_row, visible);
#pragma omp simd
              for (int64_t i = 0; i < padded; ++i) {
                p_row[i] = fast_exp(p_row[i] - row_lse);
                ds_row[i] = scale * p_row[i] * (ds_row[i] - row_delta);
              }
              if (padded < key_count) std::fill(p_row + padded, p_row + key_count, 0.0f);
              std::fill(ds_row + visible, ds_row + key_count, 0.0f);
            }
            multiply(p, Transpose::yes, doutput, Transpose::no, {dvalue.row(first_key), dvalue.pitch}, key_count, width,
                     count, true);
            multiply(ds, Transpose::yes, query, Transpose::no, {dkey.row(first_key), dkey.pitch}, key_count, width,
                     count, true);
            multiply(ds, Transpose::no, key_block, Transpose::no, dquery, count, width, key_count, first_key > 0);
          });
          dquery_head.rows_from(first).round(dquery, count);
        }
      }
      dkey_head.round(dkey, keys);
      dvalue_head.round(dvalue, keys);
    });
  });
}

}  // namespace optimus::cpu
