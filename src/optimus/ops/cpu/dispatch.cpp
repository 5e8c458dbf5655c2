// The index from rows to tokens and back, and the copies that follow it.
//
// An index is made in three stages over blocks of tokens (K1 to K3 of the Optimus paper), free of atomics: count each
// block's rows of each group (a local expert, or a rank); scan the counts, groups outermost, so that a block knows where
// its rows of a group begin; let each block write its rows in token order. Rows of a group are therefore in token order.
//
// The order of rows has all of them; what is written is its wave [first_row, first_row + R). A block's rows of a group
// follow each other, so the scan also knows how many of them the wave has, and where the block's token lists begin.
#include <algorithm>
#include <numeric>
#include <utility>

#include "optimus/ops/cpu/cpu_ops.h"

namespace optimus::cpu {
namespace {

constexpr int64_t kTokenBlock = 256;

/// for_each_row(t, visit) calls visit(group, k) for every row that token t has in any wave, k ascending, always the same.
/// `slots` [R] receives t*top_k + k, or is null.
template <typename ForEachRow>
void make_index(int64_t tokens, int64_t top_k, int64_t first_row, const RouteIndex& index, int32_t* slots,
                Scratch& scratch, const ForEachRow& for_each_row) {
  const int64_t groups = index.offsets_L1.elements() - 1, capacity = index.token_R.elements();
  const int64_t blocks = ceil_div(tokens, kTokenBlock);
  int32_t* offsets = index.offsets_L1.as<int32_t>();
  int32_t* token = index.token_R.as<int32_t>();
  int32_t* row_ptr = index.row_ptr_T1.as<int32_t>();
  int32_t* row = index.row_R.as<int32_t>();
  int32_t* group_rows = scratch.request<int32_t>(blocks * (groups + 1));  // of each block; then where its rows begin
  int32_t* block_entries = group_rows + blocks * groups;  // rows of the wave; then where the block's lists begin
  const auto in_wave = [=](int64_t r) { return int32_t(std::clamp<int64_t>(r - first_row, 0, capacity)); };

  parallel_ranges(blocks, kTokenBlock * top_k, [&](int64_t begin, int64_t end) {
    std::fill(group_rows + begin * groups, group_rows + end * groups, 0);
    for (int64_t t = begin * kTokenBlock; t < std::min(tokens, end * kTokenBlock); ++t) {
      int32_t* counts = group_rows + t / kTokenBlock * groups;
      for_each_row(t, [&](int64_t group, int64_t) { ++counts[group]; });
    }
  });

  std::fill_n(block_entries, blocks, 0);
  int32_t next = 0;
  for (int64_t group = 0; group < groups; ++group) {
    offsets[group] = in_wave(next);
    for (int64_t block = 0; block < blocks; ++block) {
      const int32_t begin = next;
      next += std::exchange(group_rows[block * groups + group], begin);
      block_entries[block] += in_wave(next) - in_wave(begin);
    }
  }
  offsets[groups] = row_ptr[tokens] = in_wave(next);
  std::exclusive_scan(block_entries, block_entries + blocks, block_entries, 0);

  parallel_ranges(blocks, 4 * kTokenBlock * top_k, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      int32_t* cursors = group_rows + block * groups;
      int32_t entry = block_entries[block];
      for (int64_t t = block * kTokenBlock; t < std::min(tokens, (block + 1) * kTokenBlock); ++t) {
        row_ptr[t] = entry;
        for_each_row(t, [&](int64_t group, int64_t k) {
          const int64_t r = cursors[group]++ - first_row;
          if (r < 0 || r >= capacity) return;
          token[r] = int32_t(t);
          if (slots) slots[r] = int32_t(t * top_k + k);
          row[entry++] = int32_t(r);
        });
      }
    }
  });
}

}  // namespace

void CpuOps::route(Tensor ids_TK, int64_t first_expert, int64_t first_row, const RouteIndex& index) {
  expects(first_row >= 0, "route from row {}", first_row);
  const int64_t top_k = ids_TK.columns(), experts = index.offsets_L1.elements() - 1;
  const Rows<int32_t> ids(ids_TK);
  make_index(ids_TK.rows(), top_k, first_row, index, index.slot_R.as<int32_t>(), scratch_,
             [=](int64_t t, const auto& visit) {
               for (int64_t k = 0; k < top_k; ++k) {
                 const int64_t expert = ids[t][k] - first_expert;
                 if (expert >= 0 && expert < experts) visit(expert, k);
               }
             });
}

void CpuOps::route_to_ranks(Tensor ids_TK, int64_t experts_per_rank, const RouteIndex& index) {
  const int64_t tokens = ids_TK.rows(), top_k = ids_TK.columns(), ranks = index.offsets_L1.elements() - 1;
  expects(index.token_R.elements() >= tokens * std::min(top_k, ranks),
          "route to {} ranks: {} rows are too few for {} tokens of {} experts", ranks, index.token_R.elements(), tokens,
          top_k);
  const Rows<int32_t> ids(ids_TK);
  const int32_t each = int32_t(experts_per_rank);
  make_index(tokens, top_k, 0, index, nullptr, scratch_, [=](int64_t t, const auto& visit) {
    const int32_t* experts = ids[t];
    for (int64_t k = 0; k < top_k; ++k) {
      const int32_t rank = experts[k] / each;
      if (experts[k] < 0 || rank >= ranks) continue;
      const int32_t first = rank * each, last = first + each - 1;
      bool sent = false;  // by an earlier expert of the rank; without branches, which nothing could predict
      for (int64_t j = 0; j < k; ++j) sent |= (experts[j] >= first) & (experts[j] <= last);
      if (!sent) visit(rank, k);
    }
  });
}

void CpuOps::gather_rows(Tensor x_TD, const RouteIndex& index, Tensor rows_RD) {
  const int64_t columns = x_TD.columns(), rows = index.offsets_L1.as<int32_t>()[index.offsets_L1.elements() - 1];
  const int32_t* token = index.token_R.as<int32_t>();
  const auto gather_as = [&]<typename T>(T) {
    const Rows<T> from(x_TD), to(rows_RD);
    parallel_ranges(rows, columns, [&](int64_t begin, int64_t end) {
      for (int64_t r = begin; r < end; ++r) std::copy_n(from[token[r]], columns, to[r]);
    });
  };
  if (x_TD.dtype == DType::i32) return gather_as(int32_t{});
  with_real(x_TD.dtype, gather_as);
}

void CpuOps::combine_rows(Tensor rows_RD, const RouteIndex& index, Tensor addend_TD, Tensor y_TD) {
  constexpr int64_t kColumns = 128;
  const int64_t tokens = y_TD.rows(), columns = y_TD.columns();
  const int32_t* row_ptr = index.row_ptr_T1.as<int32_t>();
  const int32_t* row = index.row_R.as<int32_t>();
  const bool in_place = addend_TD.same_view(y_TD);
  with_real(y_TD.dtype, [&]<typename T>(T) {
    const Rows<T> from(rows_RD), addends(addend_TD), to(y_TD);
    parallel_ranges(tokens, 2 * columns, [&](int64_t begin, int64_t end) {
      float sum[kColumns];
      for (int64_t t = begin; t < end; ++t) {
        if (in_place && row_ptr[t] == row_ptr[t + 1]) continue;  // most tokens of every wave but the first
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
