// The index from rows to tokens and back, and the copies that follow it.
//
// route() in three stages over blocks of tokens (K1 to K3 of the Optimus paper), free of atomics: count each block's
// pairs of each local expert; scan the counts, experts outermost, so that a block knows where its rows of an expert
// begin; let each block write its rows in token order. Rows of an expert are therefore in token order.
#include <utility>

#include "optimus/ops/cpu/cpu_ops.h"

namespace optimus::cpu {
namespace {

constexpr int64_t kTokenBlock = 256;

}  // namespace

void CpuOps::route(Tensor ids_TK, int64_t first_expert, const RouteIndex& index) {
  const int64_t tokens = ids_TK.rows(), top_k = ids_TK.columns(), experts = index.offsets_L1.elements() - 1;
  const int64_t blocks = ceil_div(tokens, kTokenBlock);
  const Rows<int32_t> ids(ids_TK);
  int32_t* offsets = index.offsets_L1.as<int32_t>();
  int32_t* token = index.token_R.as<int32_t>();
  int32_t* slot = index.slot_R.as<int32_t>();
  int32_t* row_ptr = index.row_ptr_T1.as<int32_t>();
  int32_t* row = index.row_R.as<int32_t>();
  int32_t* expert_counts = scratch_.request<int32_t>(blocks * (experts + 1));  // of each block; then where it begins
  int32_t* token_counts = expert_counts + blocks * experts;

  // visit(t, k, local expert) for the block's local pairs, in order.
  const auto for_each_pair = [&](int64_t block, auto&& start_token, auto&& visit) {
    for (int64_t t = block * kTokenBlock; t < std::min(tokens, (block + 1) * kTokenBlock); ++t) {
      start_token(t);
      for (int64_t k = 0; k < top_k; ++k) {
        const int64_t expert = ids[t][k] - first_expert;
        if (expert >= 0 && expert < experts) visit(t, k, expert);
      }
    }
  };

  parallel_ranges(blocks, kTokenBlock * top_k, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      int32_t* counts = expert_counts + block * experts;
      std::fill_n(counts, experts, 0);
      token_counts[block] = 0;
      for_each_pair(
          block, [](int64_t) {},
          [&](int64_t, int64_t, int64_t expert) {
            ++counts[expert];
            ++token_counts[block];
          });
    }
  });

  int32_t next = 0;
  const auto exclusive = [&](int32_t& count) { next += std::exchange(count, next); };
  for (int64_t expert = 0; expert < experts; ++expert) {
    offsets[expert] = next;
    for (int64_t block = 0; block < blocks; ++block) exclusive(expert_counts[block * experts + expert]);
  }
  offsets[experts] = next;
  row_ptr[tokens] = next;
  next = 0;
  for (int64_t block = 0; block < blocks; ++block) exclusive(token_counts[block]);

  parallel_ranges(blocks, 4 * kTokenBlock * top_k, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      int32_t* cursors = expert_counts + block * experts;
      int32_t entry = token_counts[block];
      for_each_pair(
          block, [&](int64_t t) { row_ptr[t] = entry; },
          [&](int64_t t, int64_t k, int64_t expert) {
            const int32_t r = cursors[expert]++;
            token[r] = int32_t(t);
            slot[r] = int32_t(t * top_k + k);
            row[entry++] = r;
          });
    }
  });
}

void CpuOps::gather_rows(Tensor x_TD, const RouteIndex& index, Tensor rows_RD) {
  const int64_t columns = x_TD.columns(), rows = index.offsets_L1.as<int32_t>()[index.offsets_L1.elements() - 1];
  const int32_t* token = index.token_R.as<int32_t>();
  with_real(x_TD.dtype, [&]<typename T>(T) {
    const Rows<T> from(x_TD), to(rows_RD);
    parallel_ranges(rows, columns, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) std::copy_n(from[token[r]], columns, to[r]);
    });
  });
}

void CpuOps::combine_rows(Tensor rows_RD, const RouteIndex& index, Tensor addend_TD, Tensor y_TD) {
  constexpr int64_t kColumns = 128;
  const int64_t tokens = y_TD.rows(), columns = y_TD.columns();
  const int32_t* row_ptr = index.row_ptr_T1.as<int32_t>();
  const int32_t* row = index.row_R.as<int32_t>();
  with_real(y_TD.dtype, [&]<typename T>(T) {
    const Rows<T> from(rows_RD), addends(addend_TD), to(y_TD);
    parallel_ranges(tokens, 2 * columns, [&](int64_t begin, int64_t end) {
      float sum[kColumns];
      for (int64_t t = begin; t < end; ++t) {
        for (int64_t column = 0; column < columns; column += kColumns) {
          const int64_t count = std::min(kColumns, columns - column);
          std::fill_n(sum, count, 0.0f);
          for (int32_t entry = row_ptr[t]; entry < row_ptr[t + 1]; ++entry) {
            const T* part = from[row[entry]] + column;
#pragma omp simd
            for (int64_t i = 0; i < count; ++i) sum[i] += float(part[i]);
          }
          if (addends) {
            const T* addend = addends[t] + column;
#pragma omp simd
            for (int64_t i = 0; i < count; ++i) sum[i] += float(addend[i]);
          }
          T* result = to[t] + column;
#pragma omp simd
          for (int64_t i = 0; i < count; ++i) store(result[i], sum[i]);
        }
      }
    });
  });
}

}  // namespace optimus::cpu
