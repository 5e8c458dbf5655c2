// Copies, sums, constants and random numbers.
#include <type_traits>

#include "optimus/ops/cpu/cpu_ops.h"

namespace optimus::cpu {

void CpuOps::fill(Tensor x, double value) {
  auto fill_as = [&]<typename T>(T) {
    const T converted = [&] {
      if constexpr (std::is_same_v<T, bf16>) return bf16(float(value));
      else return T(value);
    }();
    const Rows<T> target(x);
    parallel_spans(x.rows(), x.columns(), x.contiguous(), [&](int64_t row, int64_t first, int64_t count) {
      std::fill_n(target[row] + first, count, converted);
    });
  };
  switch (x.dtype) {
    case DType::i16: return fill_as(int16_t{});
    case DType::i32: return fill_as(int32_t{});
    case DType::i64: return fill_as(int64_t{});
    case DType::f64: return fill_as(double{});
    default: with_real(x.dtype, fill_as);
  }
}

void CpuOps::copy(Tensor from, Tensor to) {
  expects(from.elements() == to.elements() && from.columns() == to.columns(), "copy of {} to {}", from.shape, to.shape);
  const bool flat = from.contiguous() && to.contiguous();
  auto copy_as = [&]<typename From, typename To>(From, To) {
    const Rows<From> sources(from);
    const Rows<To> targets(to);
    parallel_spans(to.rows(), to.columns(), flat, [&](int64_t row, int64_t first, int64_t count) {
      const From* source = sources[row] + first;
      To* target = targets[row] + first;
      if constexpr (std::is_same_v<From, To>) {
        std::copy_n(source, count, target);
      } else {
#pragma omp simd
        for (int64_t i = 0; i < count; ++i) store(target[i], float(source[i]));
      }
    });
  };
  if (from.dtype != DType::f32 && from.dtype != DType::bf16) {
    expects(from.dtype == to.dtype, "copy of {} to {}", name_of(from.dtype), name_of(to.dtype));
    switch (from.dtype) {
      case DType::i16: return copy_as(int16_t{}, int16_t{});
      case DType::i32: return copy_as(int32_t{}, int32_t{});
      case DType::i64: return copy_as(int64_t{}, int64_t{});
      default: return copy_as(double{}, double{});
    }
  }
  with_real(from.dtype, [&]<typename From>(From f) { with_real(to.dtype, [&]<typename To>(To t) { copy_as(f, t); }); });
}

void CpuOps::add(Tensor a, Tensor b, Tensor y) {
  const bool flat = a.contiguous() && b.contiguous() && y.contiguous();
  with_real(y.dtype, [&]<typename T>(T) {
    const Rows<T> lefts(a), rights(b), sums(y);
    parallel_spans(y.rows(), y.columns(), flat, [&](int64_t row, int64_t first, int64_t count) {
      const T* left = lefts[row] + first;
      const T* right = rights[row] + first;
      T* sum = sums[row] + first;
#pragma omp simd
      for (int64_t i = 0; i < count; ++i) store(sum[i], float(left[i]) + float(right[i]));
    });
  });
}

void CpuOps::fill_normal(Tensor x, float std, const Philox& generator, uint64_t stream, int64_t first_index) {
  constexpr int64_t kWorkEach = 64;  // a logarithm, a cosine and half a Philox block
  with_real(x.dtype, [&]<typename T>(T) {
    T* values = x.as<T>();
    parallel_ranges(x.elements(), kWorkEach, [&](int64_t begin, int64_t end) {
      uint32_t words[4];
      for (int64_t i = begin; i < end; ++i) {
        const uint64_t index = uint64_t(first_index + i);
        const uint64_t odd = index & 1;
        if (i == begin || odd == 0) generator(index >> 1, stream, words);  // a pair shares one block
        values[i] = T(std * normal_from(words[2 * odd], words[2 * odd + 1]));
      }
    });
  });
}

}  // namespace optimus::cpu
