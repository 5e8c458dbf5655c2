// What the portable attention kernels are made of: tiles of f32 numbers in shared memory and products of them, of a block
// of 16 x 16 threads (y, x); 16 lanes of a warp share y.
//
// Of a tile of scores a thread has the rows y*rows ... and the columns x, x+16, ...; of a result (rows by head_dim) the
// same rows and vectors of adjacent columns. Heads are padded to W columns with zeros, and so are missing rows, so that
// products need no bounds. Rows in shared memory are kPad floats longer: 8 lanes that read 16 bytes of adjacent rows
// each then meet different banks.
#pragma once

#include "optimus/ops/cuda/kernels.cuh"

namespace optimus::cuda::tiles {

constexpr int kSide = 16;
constexpr int kThreads = kSide * kSide;
constexpr int kPad = 4;

/// A tensor [rows, heads*head_dim]; `vectors`: 4 elements of a head may move as one access.
template <typename T>
struct HeadRows : Matrix<T> {
  HeadRows(const Tensor& tensor, int64_t head_dim)
      : Matrix<T>(tensor),
        vectors(head_dim % 4 == 0 && tensor.pitch % 4 == 0 &&
                reinterpret_cast<uintptr_t>(tensor.data) % (4 * sizeof(T)) == 0) {}
  bool vectors;
};

__device__ inline int thread_x() { return int(threadIdx.x) % kSide; }
__device__ inline int thread_y() { return int(threadIdx.x) / kSide; }

/// Lanes of equal y get the same sum (or maximum).
template <typename Combine>
__device__ float reduce_row(float value, Combine combine) {
#pragma unroll
  for (int offset = kSide / 2; offset > 0; offset /= 2)
    value = combine(value, __shfl_xor_sync(kAllLanes, value, offset));
  return value;
}

/// tile = `rows` rows of a head from `first_row` on, of kRows at most; zeros past them and past head_dim.
template <int W, int kRows, typename T>
__device__ void load_tile(const HeadRows<const T>& from, int64_t first_row, int head, int rows, int head_dim,
                          float* tile) {
  constexpr int kQuads = W / 4, kStep = kThreads / kQuads;  // rows that all threads load at once
  static_assert(kRows % kStep == 0);
  const int first = int(threadIdx.x) / kQuads, column = int(threadIdx.x) % kQuads * 4;
  const T* source = from[first_row + first] + int64_t(head) * head_dim + column;
  float* target = tile + first * (W + kPad) + column;
#pragma unroll 4
  for (int step = 0; step < kRows / kStep; ++step) {
    const int row = first + step * kStep;
    Vector<float, 4> values{};
    if (row < rows && column < head_dim) {
      if (from.vectors) {
        const Vector<T, 4> loaded = load_vector<T, 4>(source);
#pragma unroll
        for (int e = 0; e < 4; ++e) values[e] = to_float(loaded[e]);
      } else {
#pragma unroll
        for (int e = 0; e < 4; ++e)
          if (column + e < head_dim) values[e] = to_float(source[e]);
      }
    }
    store_vector<float, 4>(target, values);
    source += kStep * from.pitch;
    target += kStep * (W + kPad);
  }
}

/// out[i][j] = (row i of a) . (row 16j of b); a and b point at the thread's first rows.
template <int W, int kRows, int kColumns>
__device__ void multiply_rows(const float* a, const float* b, float (&out)[kRows][kColumns]) {
#pragma unroll
  for (int i = 0; i < kRows; ++i)
#pragma unroll
    for (int j = 0; j < kColumns; ++j) out[i][j] = 0.0f;
#pragma unroll 2
  for (int d = 0; d < W; d += 4) {
    Vector<float, 4> x[kRows], y[kColumns];
#pragma unroll
    for (int i = 0; i < kRows; ++i) x[i] = load_vector<float, 4>(a + i * (W + kPad) + d);
#pragma unroll
    for (int j = 0; j < kColumns; ++j) y[j] = load_vector<float, 4>(b + j * kSide * (W + kPad) + d);
#pragma unroll
    for (int e = 0; e < 4; ++e)
#pragma unroll
      for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int j = 0; j < kColumns; ++j) out[i][j] = fmaf(x[i][e], y[j][e], out[i][j]);
  }
}

/// A thread's part of a result: kRows rows by W/16 columns, in vectors of kVector, 16 vectors of a row side by side.
template <int W, int kRows>
struct Result {
  static constexpr int kVector = W >= 64 ? 4 : 2, kVectors = W / kSide / kVector;
  float values[kRows][W / kSide];

  __device__ static int column(int vector) { return (vector * kSide + thread_x()) * kVector; }
  __device__ void clear() {
#pragma unroll
    for (int i = 0; i < kRows; ++i)
#pragma unroll
      for (int c = 0; c < W / kSide; ++c) values[i][c] = 0.0f;
  }
  __device__ void scale_row(int row, float factor) {
#pragma unroll
    for (int c = 0; c < W / kSide; ++c) values[row][c] *= factor;
  }
  /// += weights (one a row) * the row of a tile.
  __device__ void add(const float (&weights)[kRows], const float* tile_row) {
#pragma unroll
    for (int vector = 0; vector < kVectors; ++vector) {
      const auto y = load_vector<float, kVector>(tile_row + column(vector));
#pragma unroll
      for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int e = 0; e < kVector; ++e)
          values[i][vector * kVector + e] = fmaf(weights[i], y[e], values[i][vector * kVector + e]);
    }
  }
  /// += p b, p [rows, kInner] at the thread's first row, b [kInner, W].
  template <int kInner>
  __device__ void add_product(const float* p, const float* b) {
#pragma unroll 2
    for (int j = 0; j < kInner; j += 4) {
      Vector<float, 4> x[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) x[i] = load_vector<float, 4>(p + i * (kInner + kPad) + j);
#pragma unroll
      for (int e = 0; e < 4; ++e) {
        float weights[kRows];
#pragma unroll
        for (int i = 0; i < kRows; ++i) weights[i] = x[i][e];
        add(weights, b + (j + e) * (W + kPad));
      }
    }
  }
  /// += p^T b, p [kInner, 16*kRows] at the thread's first column, b [kInner, W].
  template <int kInner>
  __device__ void add_transposed_product(const float* p, const float* b) {
#pragma unroll 2
    for (int j = 0; j < kInner; ++j) {
      const auto x = load_vector<float, kRows>(p + j * (kSide * kRows + kPad));
      float weights[kRows];
#pragma unroll
      for (int i = 0; i < kRows; ++i) weights[i] = x[i];
      add(weights, b + j * (W + kPad));
    }
  }
  /// To `rows` rows of a head from `first_row` on.
  template <typename T>
  __device__ void store(const HeadRows<T>& to, int64_t first_row, int head, int rows, int head_dim) const {
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      const int row = thread_y() * kRows + i;
      if (row >= rows) continue;
      T* target = to[first_row + row] + int64_t(head) * head_dim;
#pragma unroll
      for (int vector = 0; vector < kVectors; ++vector) {
        const int first = column(vector);
        Vector<T, kVector> rounded;
#pragma unroll
        for (int e = 0; e < kVector; ++e) rounded[e] = from_float<T>(values[i][vector * kVector + e]);
        if (to.vectors) {
          if (first < head_dim) store_vector<T, kVector>(target + first, rounded);
        } else {
#pragma unroll
          for (int e = 0; e < kVector; ++e)
            if (first + e < head_dim) target[first + e] = rounded[e];
        }
      }
    }
  }
};

}  // namespace optimus::cuda::tiles
