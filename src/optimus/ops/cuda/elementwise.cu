// Copies, sums, constants and random numbers: all bound by memory.
//
// A tensor is walked in units of N neighbouring elements of a row, the last unit of a row maybe shorter. N fills 16-byte
// accesses where every row of every operand begins at such a boundary, else it is 1. A thread takes kUnits units that lie
// a block's width apart, and asks for all of them before it uses the first.
#include "optimus/ops/cuda/kernels.cuh"

namespace optimus::cuda {
namespace {

constexpr int kThreads = 256;
constexpr int kUnits = 4;

/// Where the units of a tensor lie. A tensor without gaps is a single row.
struct Units {
  int64_t columns, units_each, count;
  double rows_a_unit;  ///< 1 / units_each: a product and a correction are cheaper than a division of 64-bit integers
};
struct Place {
  int64_t row, column;
};

__device__ Place place_of(const Units& units, int64_t unit, int width) {
  int64_t row = int64_t(double(unit) * units.rows_a_unit);
  int64_t rest = unit - row * units.units_each;
  if (rest < 0) --row, rest += units.units_each;
  else if (rest >= units.units_each) ++row, rest -= units.units_each;
  return {row, rest * width};
}

Units units_of(const Tensor& tensor, bool flat, int width) {
  const int64_t rows = flat ? 1 : tensor.rows(), columns = flat ? tensor.elements() : tensor.columns();
  const int64_t each = ceil_div(columns, width);
  return {columns, each, rows * each, 1.0 / double(std::max<int64_t>(each, 1))};
}

/// Whether every row begins at a multiple of `bytes`.
bool rows_aligned(const Tensor& tensor, bool flat, int64_t bytes) {
  return reinterpret_cast<uintptr_t>(tensor.data) % uintptr_t(bytes) == 0 &&
         (flat || tensor.rows() <= 1 || tensor.pitch * size_of(tensor.dtype) % bytes == 0);
}

int64_t blocks_of(const Units& units) { return ceil_div(units.count, kThreads * kUnits); }

__device__ int64_t first_unit() { return int64_t(blockIdx.x) * (kThreads * kUnits) + threadIdx.x; }

// ---- fill ----

/// Word is an unsigned integer of the element's size.
template <typename Word, int N>
__global__ void __launch_bounds__(kThreads, 4) fill_kernel(Word* x, int64_t pitch, Units units, Word value) {
  Vector<Word, N> values;
#pragma unroll
  for (int i = 0; i < N; ++i) values[i] = value;
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    const int64_t unit = first_unit() + k * kThreads;
    if (unit >= units.count) return;
    const auto [row, column] = place_of(units, unit, N);
    Word* to = x + row * pitch + column;
    if (N == 1 || column + N <= units.columns) {
      store_vector<Word, N>(to, values);
    } else {
      for (int i = 0; column + i < units.columns; ++i) to[i] = value;
    }
  }
}

template <typename Word>
void fill_words(const Tensor& x, Word value, cudaStream_t stream) {
  constexpr int kWidth = 16 / int(sizeof(Word));
  const bool flat = x.contiguous();
  const auto run = [&](auto width) {
    constexpr int N = decltype(width)::value;
    const Units units = units_of(x, flat, N);
    launch(fill_kernel<Word, N>, blocks_of(units), kThreads, 0, stream, pointer<Word>(x), x.pitch, units, value);
  };
  if (rows_aligned(x, flat, 16)) run(std::integral_constant<int, kWidth>{});
  else run(std::integral_constant<int, 1>{});
}

// ---- copy ----

__device__ void convert(float from, bfloat& to) { to = __float2bfloat16_rn(from); }
__device__ void convert(bfloat from, float& to) { to = __bfloat162float(from); }
template <typename Word>
__device__ void convert(Word from, Word& to) {
  to = from;
}

template <typename From, typename To, int N>
__global__ void __launch_bounds__(kThreads, 4)
    copy_kernel(const From* from, int64_t from_pitch, To* to, int64_t to_pitch, Units units) {
  Vector<From, N> sources[kUnits];
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    const int64_t unit = first_unit() + k * kThreads;
    if (unit >= units.count) break;
    const auto [row, column] = place_of(units, unit, N);
    if (N == 1 || column + N <= units.columns) sources[k] = load_vector<From, N>(from + row * from_pitch + column);
  }
#pragma unroll
  for (int k = 0; k < kUnits; ++k) {
    const int64_t unit = first_unit() + k * kThreads;
    if (unit >= units.count) break;
    const auto [row, column] = place_of(units, unit, N);
    To* target = to + row * to_pitch + column;
    if (N == 1 || column + N <= units.columns) {
      Vector<To, N> targets;
#pragma unroll
      for (int i = 0; i < N; ++i) convert(sources[k][i], targets[i]);
      store_vector<To, N>(target, targets);
    } else {
      const From* source = from + row * from_pitch + column;
      for (int i = 0; column + i < units.columns; ++i) convert(source[i], target[i]);
    }
  }
}

template <typename From, typename To>
void copy_as(const Tensor& from, const Tensor& to, cudaStream_t stream) {
  constexpr int kWidth = 16 / int(sizeof(From) > sizeof(To) ? sizeof(From) : sizeof(To));
  const bool flat = from.contiguous() && to.contiguous();
  const auto run = [&](auto width) {
    constexpr int N = decltype(width)::value;
    const Units units = units_of(to, flat, N);
    launch(copy_kernel<From, To, N>, blocks_of(units), kThreads, 0, stream, pointer<const From>(from), from.pitch,
           pointer<To>(to), to.pitch, units);
  };
  if (rows_aligned(from, flat, kWidth * int64_t(sizeof(From))) && rows_aligned(to, flat, kWidth * int64_t(sizeof(To))))
    run(std::integral_constant<int, kWidth>{});
  else run(std::integral_constant<int, 1>{});
}

// ---- add ----

constexpr int kPairs = kUnits / 2;

// y may be a or b: a thread has read its elements of both before it writes them, and nobody else reads them.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads, 4)
    add_kernel(const T* a, int64_t a_pitch, const T* b, int64_t b_pitch, T* y, int64_t y_pitch, Units units) {
  Vector<T, N> lefts[kPairs], rights[kPairs];
#pragma unroll
  for (int k = 0; k < kPairs; ++k) {
    const int64_t unit = int64_t(blockIdx.x) * (kThreads * kPairs) + threadIdx.x + k * kThreads;
    if (unit >= units.count) break;
    const auto [row, column] = place_of(units, unit, N);
    if (N > 1 && column + N > units.columns) continue;
    lefts[k] = load_vector<T, N>(a + row * a_pitch + column);
    rights[k] = load_vector<T, N>(b + row * b_pitch + column);
  }
#pragma unroll
  for (int k = 0; k < kPairs; ++k) {
    const int64_t unit = int64_t(blockIdx.x) * (kThreads * kPairs) + threadIdx.x + k * kThreads;
    if (unit >= units.count) break;
    const auto [row, column] = place_of(units, unit, N);
    T* target = y + row * y_pitch + column;
    if (N == 1 || column + N <= units.columns) {
      Vector<T, N> sums;
#pragma unroll
      for (int i = 0; i < N; ++i) sums[i] = from_float<T>(to_float(lefts[k][i]) + to_float(rights[k][i]));
      store_vector<T, N>(target, sums);
    } else {
      const T* left = a + row * a_pitch + column;
      const T* right = b + row * b_pitch + column;
      for (int i = 0; column + i < units.columns; ++i)
        target[i] = from_float<T>(to_float(left[i]) + to_float(right[i]));
    }
  }
}

// ---- random numbers ----

/// A thread makes the two numbers of one pair of indices, which share a block of the generator.
template <typename T>
__global__ void __launch_bounds__(kThreads, 4)
    fill_normal_kernel(T* x, int64_t count, float std, Philox generator, uint64_t stream, uint64_t first_index) {
  const uint64_t pair = first_index / 2 + uint64_t(blockIdx.x) * kThreads + threadIdx.x;
  uint32_t words[4];
  generator(pair, stream, words);
#pragma unroll
  for (int odd = 0; odd < 2; ++odd) {
    const int64_t i = int64_t(pair * 2 + uint64_t(odd) - first_index);  // -1 for the number before the first one
    if (i >= 0 && i < count) x[i] = from_float<T>(std * normal_from(words[2 * odd], words[2 * odd + 1]));
  }
}

}  // namespace

void CudaOps::fill(Tensor x, double value) {
  switch (x.dtype) {
    case DType::f32: return fill_words(x, std::bit_cast<uint32_t>(float(value)), stream_);
    case DType::bf16: return fill_words(x, bf16(float(value)).bits, stream_);
    case DType::f64: return fill_words(x, std::bit_cast<uint64_t>(value), stream_);
    case DType::i16: return fill_words(x, uint16_t(int16_t(value)), stream_);
    case DType::i32: return fill_words(x, uint32_t(int32_t(value)), stream_);
    case DType::i64: return fill_words(x, uint64_t(int64_t(value)), stream_);
  }
}

void CudaOps::copy(Tensor from, Tensor to) {
  expects(from.elements() == to.elements() && from.columns() == to.columns(), "copy of {} to {}", from.shape, to.shape);
  if (from.dtype == to.dtype) {
    switch (size_of(from.dtype)) {
      case 2: return copy_as<uint16_t, uint16_t>(from, to, stream_);
      case 4: return copy_as<uint32_t, uint32_t>(from, to, stream_);
      default: return copy_as<uint64_t, uint64_t>(from, to, stream_);
    }
  }
  if (from.dtype == DType::f32 && to.dtype == DType::bf16) return copy_as<float, bfloat>(from, to, stream_);
  if (from.dtype == DType::bf16 && to.dtype == DType::f32) return copy_as<bfloat, float>(from, to, stream_);
  expects(false, "copy of {} to {}", name_of(from.dtype), name_of(to.dtype));
}

void CudaOps::add(Tensor a, Tensor b, Tensor y) {
  expects(a.dtype == y.dtype && b.dtype == y.dtype && a.elements() == y.elements() && b.elements() == y.elements(),
          "add of {} {} and {} {} to {} {}", name_of(a.dtype), a.shape, name_of(b.dtype), b.shape, name_of(y.dtype),
          y.shape);
  const bool flat = a.contiguous() && b.contiguous() && y.contiguous();
  with_real(y.dtype, [&]<typename T>(T) {
    const auto run = [&](auto width) {
      constexpr int N = decltype(width)::value;
      const Units units = units_of(y, flat, N);
      launch(add_kernel<T, N>, ceil_div(units.count, kThreads * kPairs), kThreads, 0, stream_, pointer<const T>(a),
             a.pitch, pointer<const T>(b), b.pitch, pointer<T>(y), y.pitch, units);
    };
    if (rows_aligned(a, flat, 16) && rows_aligned(b, flat, 16) && rows_aligned(y, flat, 16))
      run(std::integral_constant<int, kVectorWidth<T>>{});
    else run(std::integral_constant<int, 1>{});
  });
}

void CudaOps::fill_normal(Tensor x, float std, const Philox& generator, uint64_t stream, int64_t first_index) {
  const int64_t count = x.elements();
  const int64_t pairs = count == 0 ? 0 : (first_index + count - 1) / 2 - first_index / 2 + 1;
  with_real(x.dtype, [&]<typename T>(T) {
    launch(fill_normal_kernel<T>, ceil_div(pairs, kThreads), kThreads, 0, stream_, pointer<T>(x), count, std, generator,
           stream, uint64_t(first_index));
  });
}

}  // namespace optimus::cuda
