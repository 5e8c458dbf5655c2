// What all kernels share: element types, 16-byte vectors, sums over warps and blocks in one fixed order, checked launches.
//
// Kernels take raw pointers and 64-bit element counts: a tensor may have more than 2^31 elements.
#pragma once

#include <cuda_bf16.h>

#include "optimus/ops/cuda/cuda_ops.h"

namespace optimus::cuda {

using bfloat = __nv_bfloat16;

constexpr int kWarp = 32;
constexpr unsigned kAllLanes = 0xFFFFFFFFu;

template <typename T>
T* pointer(const Tensor& tensor) {
  return static_cast<T*>(tensor.data);
}

/// visitor(float{}) or visitor(bfloat{}).
template <typename Visitor>
void with_real(DType dtype, Visitor&& visitor) {
  switch (dtype) {
    case DType::f32: return visitor(float{});
    case DType::bf16: return visitor(bfloat{});
    default: expects(false, "a kernel for reals was given {}", name_of(dtype));
  }
}

__device__ inline float to_float(float x) { return x; }
__device__ inline float to_float(bfloat x) { return __bfloat162float(x); }
template <typename T>
__device__ T from_float(float x);
template <>
__device__ inline float from_float<float>(float x) {
  return x;
}
template <>
__device__ inline bfloat from_float<bfloat>(float x) {
  return __float2bfloat16_rn(x);
}

/// Rows with their pitch, in units of T (what the tensor holds, or what moves at once); data null for an empty tensor.
template <typename T>
struct Matrix {
  T* data;
  int64_t pitch;
  explicit Matrix(const Tensor& tensor)
      : data(pointer<T>(tensor)), pitch(tensor.pitch * size_of(tensor.dtype) / int64_t(sizeof(T))) {}
  __device__ T* operator[](int64_t row) const { return data + row * pitch; }
};

/// N elements that move as one access (16 bytes at most).
template <typename T, int N>
struct alignas(sizeof(T) * N) Vector {
  T values[N];
  __device__ T& operator[](int i) { return values[i]; }
  __device__ const T& operator[](int i) const { return values[i]; }
};
template <typename T>
constexpr int kVectorWidth = 16 / int(sizeof(T));

template <typename T, int N>
__device__ Vector<T, N> load_vector(const T* from) {
  return *reinterpret_cast<const Vector<T, N>*>(from);
}
template <typename T, int N>
__device__ void store_vector(T* to, const Vector<T, N>& values) {
  *reinterpret_cast<Vector<T, N>*>(to) = values;
}

/// Whether every row of the tensor begins at a multiple of 16 bytes and holds whole vectors.
inline bool whole_vectors(const Tensor& tensor) {
  const int64_t width = 16 / size_of(tensor.dtype);
  return reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0 && tensor.columns() % width == 0 &&
         (tensor.rows() <= 1 || tensor.pitch % width == 0);
}

struct Sum {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return a + b;
  }
};
struct Max {
  template <typename T>
  __device__ T operator()(T a, T b) const {
    return a > b ? a : b;
  }
};

/// All lanes get the same result.
template <typename T, typename Combine>
__device__ T reduce_warp(T value, Combine combine) {
#pragma unroll
  for (int offset = kWarp / 2; offset > 0; offset /= 2)
    value = combine(value, __shfl_xor_sync(kAllLanes, value, offset));
  return value;
}

/// The sum of the values of the lanes up to and with the calling one.
template <typename T>
__device__ T prefix_sum_warp(T value) {
  const int lane = int(threadIdx.x) % kWarp;
#pragma unroll
  for (int offset = 1; offset < kWarp; offset *= 2) {
    const T lower = __shfl_up_sync(kAllLanes, value, unsigned(offset));
    if (lane >= offset) value += lower;
  }
  return value;
}

/// All threads of the block get the same result; every thread must call it. blockDim.x is a multiple of 32.
template <typename T, typename Combine>
__device__ T reduce_block(T value, Combine combine) {
  __shared__ T warps[32];
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp, count = int(blockDim.x) / kWarp;
  value = reduce_warp(value, combine);
  __syncthreads();  // a former call's results have been read
  if (lane == 0) warps[warp] = value;
  __syncthreads();
  T result = warps[0];
  for (int i = 1; i < count; ++i) result = combine(result, warps[i]);
  return result;
}

inline int64_t ceil_div(int64_t a, int64_t b) { return (a + b - 1) / b; }

/// Launches where there is something to do, and checks that it could be launched.
template <typename... Parameters, typename... Arguments>
void launch(void (*kernel)(Parameters...), int64_t blocks, int threads, size_t shared_bytes, cudaStream_t stream,
            Arguments&&... arguments) {
  if (blocks == 0) return;
  expects(blocks < (int64_t(1) << 31), "a grid of {} blocks", blocks);
  kernel<<<unsigned(blocks), unsigned(threads), shared_bytes, stream>>>(Parameters(arguments)...);
  check(cudaGetLastError(), "kernel launch");
}

}  // namespace optimus::cuda
