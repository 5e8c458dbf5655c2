#include "optimus/comm/rank_sum.h"

#include <algorithm>

#include "optimus/ops/cpu/parallel.h"

namespace optimus {
namespace {

template <typename T, typename Sum>
void sum_as(std::span<const void* const> pieces, T* out, int64_t count) {
  constexpr int64_t kBlock = 1024;  // sums that stay in the first-level cache while the ranks' values pass by
  cpu::parallel_ranges(count, int64_t(pieces.size()), [&](int64_t begin, int64_t end) {
    Sum sums[kBlock];
    for (int64_t first = begin; first < end; first += kBlock) {
      const int64_t n = std::min(kBlock, end - first);
      const auto values_of = [&](size_t rank) { return static_cast<const T*>(pieces[rank]) + first; };
      const T* values = values_of(0);
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) sums[i] = Sum(values[i]);
      for (size_t rank = 1; rank < pieces.size(); ++rank) {
        values = values_of(rank);
#pragma omp simd
        for (int64_t i = 0; i < n; ++i) sums[i] += Sum(values[i]);
      }
      T* to = out + first;
#pragma omp simd
      for (int64_t i = 0; i < n; ++i) {
        if constexpr (std::is_same_v<T, bf16>) to[i].bits = bf16::rounded_bits(sums[i]);
        else to[i] = sums[i];
      }
    }
  });
}

}  // namespace

void sum_in_rank_order(DType dtype, std::span<const void* const> pieces, void* out, int64_t count) {
  switch (dtype) {
    case DType::f32: return sum_as<float, float>(pieces, static_cast<float*>(out), count);
    case DType::bf16: return sum_as<bf16, float>(pieces, static_cast<bf16*>(out), count);
    case DType::f64: return sum_as<double, double>(pieces, static_cast<double*>(out), count);
    case DType::i32: return sum_as<int32_t, int32_t>(pieces, static_cast<int32_t*>(out), count);
    case DType::i16:
    case DType::i64: break;
  }
  expects(false, "a sum over ranks of {}", name_of(dtype));
}

}  // namespace optimus
