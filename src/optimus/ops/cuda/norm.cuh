// What normalisation's kernels share. They work on vectors, a vector being one group of W columns of one row. It
// belongs to a team of threads: up to a warp for short vectors, a block for long ones. Each thread holds its 16-byte
// units of the vector in registers between statistics and output. Vectors that cannot move in units of 16 bytes, or are
// too long for registers, are read from memory again by a block ("wide").
#pragma once

#include <algorithm>
#include <initializer_list>

#include "optimus/ops/cuda/kernels.cuh"

namespace optimus::cuda {

constexpr int kWideThreads = 512;  // at most, of the wide kernels

/// Vector v is group v % groups of row v / groups.
struct Vectors {
  unsigned count, groups, width;

  struct Place {
    unsigned row, group;
  };
  __device__ Place operator[](unsigned vector) const {
    const unsigned row = vector / groups;
    return {row, vector - row * groups};
  }
  template <typename T>
  __device__ T* in(const Matrix<T>& matrix, Place place) const {
    return matrix[place.row] + int64_t(place.group) * width;
  }
};

__device__ inline float* statistics_at(const Matrix<float>& statistics, Vectors::Place place) {
  return statistics[place.row] + 2 * int64_t(place.group);
}

template <typename T>
using Unit = Vector<T, kVectorWidth<T>>;

template <typename T>
__device__ Unit<T> load_or_zero(bool inside, const T* from) {
  uint4 bits = make_uint4(0, 0, 0, 0);
  if (inside) bits = *reinterpret_cast<const uint4*>(from);
  Unit<T> out;
  *reinterpret_cast<uint4*>(&out) = bits;
  return out;
}

/// Hides where the unit's bits come from. Without it the compiler keeps bf16 that is used again unpacked, in twice the
/// registers.
template <typename T>
__device__ void keep_packed(Unit<T>& unit) {
  uint4& bits = *reinterpret_cast<uint4*>(&unit);
  asm volatile("" : "+r"(bits.x), "+r"(bits.y), "+r"(bits.z), "+r"(bits.w));
}

/// Of weight or bias, which nothing writes meanwhile: such loads may pass stores.
template <typename T, int N>
__device__ Vector<T, N> load_parameter(const T* from) {
  Vector<T, N> out;
  if constexpr (sizeof(out) == 16) *reinterpret_cast<uint4*>(&out) = __ldg(reinterpret_cast<const uint4*>(from));
  else out = load_vector<T, N>(from);
  return out;
}

/// Of a team of 2^k neighbouring lanes; every lane of the warp calls it.
__device__ inline float sum_lanes(float value, int lanes) {
  for (int offset = lanes / 2; offset > 0; offset /= 2) value += __shfl_xor_sync(kAllLanes, value, offset);
  return value;
}

inline Vectors vectors_of(const Tensor& x, int64_t groups) {
  const int64_t width = x.columns() / groups, count = x.rows() * groups;
  expects(width * groups == x.columns(), "norm of {} columns in {} groups", x.columns(), groups);
  expects(count < (int64_t(1) << 31) && width < (int64_t(1) << 30), "norm of {} vectors of {}", count, width);
  return {unsigned(count), unsigned(groups), unsigned(width)};
}

/// Whether every group of every row of the tensors that are there moves in units of 16 bytes.
inline bool whole_units(int64_t width, DType dtype, std::initializer_list<Tensor> tensors) {
  bool whole = width % (16 / size_of(dtype)) == 0;
  for (const Tensor& tensor : tensors) whole = whole && (!tensor || whole_vectors(tensor));
  return whole;
}

/// The least power of two that covers `units`, at most a warp.
inline int lane_bits_for(int64_t units) {
  int bits = 0;
  while (bits < 5 && (1 << bits) < units) ++bits;
  return bits;
}

inline int whole_warps(int64_t threads) { return int(ceil_div(threads, kWarp) * kWarp); }

}  // namespace optimus::cuda
