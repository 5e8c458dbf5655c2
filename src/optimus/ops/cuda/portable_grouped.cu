// Products of rows grouped by expert with each expert's matrix, rows(e) = [offsets[e], offsets[e+1]):
//   forward  y[rows(e)]  = x[rows(e)] w[e]^T        input  dx[rows(e)] = dy[rows(e)] w[e]
//   weight   dw[e] (+)= dy[rows(e)]^T x[rows(e)]
//
// A block computes a tile c = a b of 64x64 by steps of 64 bytes of the reduction, f32 with fused multiply-adds, bf16 on
// tensor cores. An operand lies in memory as lines that run along the reduction ("deep") or across it; both ways occur
// on both sides. The next step's lines are loaded into registers while the present one is computed from shared memory,
// of which there are two buffers. Elements outside of an operand are zeros, and are never read: the rows that follow an
// expert's may hold NaN.
//
// Which rows belong to which expert is known on the device only. The grid has as many tiles as there could be; a block
// finds the expert of its tile by a scan of the offsets, and leaves where there is none.
#include <mma.h>

#include "optimus/ops/cuda/kernels.cuh"
#include "optimus/ops/cuda/portable_grouped.h"

namespace optimus::cuda {
namespace {

constexpr int kTile = 64, kThreads = 128;
template <typename T>
constexpr int kBlocksAtOnce = sizeof(T) == 4 ? 4 : 3;  // on a multiprocessor, at least: bounds a thread's registers
constexpr int kPaddedTile = kTile + 4;                 // floats of a line in shared memory
template <typename T>
constexpr int kDepth = 64 / int(sizeof(T));  // elements of the reduction in a step

template <typename T>
struct Operand {
  const T* data;
  int64_t pitch, lines, columns;
  bool vectors;  // lines begin at multiples of 16 bytes
};

/// How a step's lines lie in shared memory. In f32 always across the reduction: deep lines are turned on their way. For
/// tensor cores they stay as they are. Padding spreads lines over the banks.
template <typename T, bool kDeep>
constexpr int kSharedPitch = kDeep ? kDepth<T> + 8 : kTile + 8;
template <bool kDeep>
constexpr int kSharedPitch<float, kDeep> = kPaddedTile;
template <typename T, bool kDeep>
constexpr int kSharedElements = kSharedPitch<T, kDeep>*(kDeep ? kTile : kDepth<T>);
template <bool kDeep>
constexpr int kSharedElements<float, kDeep> = kPaddedTile* kDepth<float>;

/// A thread's part of a step of an operand, on its way from memory to shared memory.
template <typename T, bool kDeep>
struct Stage {
  static constexpr int kWidth = kVectorWidth<T>;
  static constexpr int kLineVectors = (kDeep ? kDepth<T> : kTile) / kWidth;
  static constexpr int kVectors = kTile * kDepth<T> / kWidth / kThreads;

  // Words, since single elements of bf16 would each take a register.
  static constexpr int kWords = 4, kInWord = 4 / int(sizeof(T));
  Vector<uint32_t, kWords> parts[kVectors];

  __device__ void fetch(const Operand<T>& from, int64_t tile, int64_t depth) {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int vector = int(threadIdx.x) + i * kThreads;
      const int64_t line = (kDeep ? tile : depth) + vector / kLineVectors;
      const int64_t column = (kDeep ? depth : tile) + vector % kLineVectors * kWidth;
      parts[i] = {};
      if (line >= from.lines || column >= from.columns) continue;
      const T* data = from.data + line * from.pitch + column;
      const int count = int(min(from.columns - column, int64_t(kWidth)));
      if (from.vectors && count == kWidth) {
        parts[i] = load_vector<uint32_t, kWords>(reinterpret_cast<const uint32_t*>(data));
      } else {
#pragma unroll
        for (int word = 0; word < kWords; ++word) {
          const int j = word * kInWord;
          if (j < count) parts[i][word] = bits(data[j]);
          if (kInWord == 2 && j + 1 < count) parts[i][word] |= bits(data[j + 1]) << 16;
        }
      }
    }
  }

  __device__ void put(T* shared) const {
#pragma unroll
    for (int i = 0; i < kVectors; ++i) {
      const int vector = int(threadIdx.x) + i * kThreads;
      const int line = vector / kLineVectors, column = vector % kLineVectors * kWidth;
      if constexpr (std::is_same_v<T, float> && kDeep) {
#pragma unroll
        for (int j = 0; j < kWidth; ++j) shared[(column + j) * kPaddedTile + line] = __uint_as_float(parts[i][j]);
      } else {
        store_vector(reinterpret_cast<uint32_t*>(shared + line * kSharedPitch<T, kDeep> + column), parts[i]);
      }
    }
  }

 private:
  static __device__ uint32_t bits(float x) { return __float_as_uint(x); }
  static __device__ uint32_t bits(bfloat x) { return __bfloat16_as_ushort(x); }
};

/// A thread's part of the tile: what the steps add to, and at last put into shared memory.
template <typename T>
struct Sums;

template <>
struct Sums<float> {
  static constexpr int kRows = 8, kColumns = 4;  // of a thread; threads stand 8x16

  float values[kRows][kColumns] = {};

  template <bool kDeepA, bool kDeepB>
  __device__ void add(const float* a, const float* b) {
    const int row = int(threadIdx.x) / 16 * kRows, column = int(threadIdx.x) % 16 * kColumns;
#pragma unroll
    for (int k = 0; k < kDepth<float>; ++k) {
      const auto upper = load_vector<float, 4>(a + k * kPaddedTile + row);
      const auto lower = load_vector<float, 4>(a + k * kPaddedTile + row + 4);
      const auto right = load_vector<float, 4>(b + k * kPaddedTile + column);
#pragma unroll
      for (int i = 0; i < kRows; ++i)
#pragma unroll
        for (int j = 0; j < kColumns; ++j)
          values[i][j] = fmaf(i < 4 ? upper[i % 4] : lower[i % 4], right[j], values[i][j]);
    }
  }

  __device__ void put(float* c) const {
    const int row = int(threadIdx.x) / 16 * kRows, column = int(threadIdx.x) % 16 * kColumns;
#pragma unroll
    for (int i = 0; i < kRows; ++i) {
      Vector<float, 4> line;
#pragma unroll
      for (int j = 0; j < kColumns; ++j) line[j] = values[i][j];
      store_vector(c + (row + i) * kPaddedTile + column, line);
    }
  }
};

/// Tensor cores add f32 by truncation, an error that grows with the length of the sum. Therefore they sum a few steps
/// only, and their sums are added up with proper rounding.
template <>
struct Sums<bfloat> {
  static constexpr int kSize = 16, kEach = 2;  // warps stand 2x2, each with 2x2 fragments
  static constexpr int kStepsTogether = 8;
  template <typename Use, typename Layout>
  using Fragment = nvcuda::wmma::fragment<Use, kSize, kSize, kSize, bfloat, Layout>;
  using Accumulator = nvcuda::wmma::fragment<nvcuda::wmma::accumulator, kSize, kSize, kSize, float>;
  template <bool kRowMajor>
  using Major = std::conditional_t<kRowMajor, nvcuda::wmma::row_major, nvcuda::wmma::col_major>;

  Accumulator values[kEach][kEach], recent[kEach][kEach];
  int steps = 0;

  __device__ Sums() {
#pragma unroll
    for (int i = 0; i < kEach; ++i)
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
        nvcuda::wmma::fill_fragment(values[i][j], 0.0f);
        nvcuda::wmma::fill_fragment(recent[i][j], 0.0f);
      }
  }

  template <bool kDeepA, bool kDeepB>
  __device__ void add(const bfloat* a, const bfloat* b) {
    constexpr int kPitchA = kSharedPitch<bfloat, kDeepA>, kPitchB = kSharedPitch<bfloat, kDeepB>;
#pragma unroll
    for (int k = 0; k < kDepth<bfloat>; k += kSize) {
      Fragment<nvcuda::wmma::matrix_a, Major<kDeepA>> left[kEach];
      Fragment<nvcuda::wmma::matrix_b, Major<!kDeepB>> right[kEach];
#pragma unroll
      for (int i = 0; i < kEach; ++i) {
        const int row = first_row() + i * kSize, column = first_column() + i * kSize;
        nvcuda::wmma::load_matrix_sync(left[i], a + (kDeepA ? row * kPitchA + k : k * kPitchA + row), kPitchA);
        nvcuda::wmma::load_matrix_sync(right[i], b + (kDeepB ? column * kPitchB + k : k * kPitchB + column), kPitchB);
      }
#pragma unroll
      for (int i = 0; i < kEach; ++i)
#pragma unroll
        for (int j = 0; j < kEach; ++j) nvcuda::wmma::mma_sync(recent[i][j], left[i], right[j], recent[i][j]);
    }
    if (++steps % kStepsTogether == 0) add_recent();
  }

  __device__ void put(float* c) {
    add_recent();
#pragma unroll
    for (int i = 0; i < kEach; ++i)
#pragma unroll
      for (int j = 0; j < kEach; ++j)
        nvcuda::wmma::store_matrix_sync(c + (first_row() + i * kSize) * kPaddedTile + first_column() + j * kSize,
                                        values[i][j], kPaddedTile, nvcuda::wmma::mem_row_major);
  }

 private:
  static __device__ int first_row() { return int(threadIdx.x) / (2 * kWarp) * kEach * kSize; }
  static __device__ int first_column() { return int(threadIdx.x) / kWarp % 2 * kEach * kSize; }
  __device__ void add_recent() {
#pragma unroll
    for (int i = 0; i < kEach; ++i)
#pragma unroll
      for (int j = 0; j < kEach; ++j) {
#pragma unroll
        for (int n = 0; n < Accumulator::num_elements; ++n) values[i][j].x[n] += recent[i][j].x[n];
        nvcuda::wmma::fill_fragment(recent[i][j], 0.0f);
      }
  }
};

constexpr int kSharedBytes = 20480;  // the two buffers of bf16, both operands deep; then c
static_assert(kSharedBytes >= 4 * kSharedElements<bfloat, true> * int(sizeof(bfloat)) &&
              kSharedBytes >= 4 * kSharedElements<bfloat, false> * int(sizeof(bfloat)) &&
              kSharedBytes >= 4 * kSharedElements<float, true> * int(sizeof(float)) &&
              kSharedBytes >= kTile * kPaddedTile * int(sizeof(float)));

/// The tile of a*b that begins at (row, column), over the whole reduction, as [kTile][kPaddedTile] in shared memory.
template <typename T, bool kDeepA, bool kDeepB>
__device__ const float* multiply(const Operand<T>& a, const Operand<T>& b, int64_t row, int64_t column,
                                 int64_t reduction, std::byte* shared) {
  constexpr int kA = kSharedElements<T, kDeepA>, kBoth = kA + kSharedElements<T, kDeepB>;
  Sums<T> sums;
  Stage<T, kDeepA> stage_a;
  Stage<T, kDeepB> stage_b;
  stage_a.fetch(a, row, 0);
  stage_b.fetch(b, column, 0);
  T* buffer = reinterpret_cast<T*>(shared);
  T* other = buffer + kBoth;
  for (int64_t depth = 0; depth < reduction; depth += kDepth<T>) {
    stage_a.put(buffer);
    stage_b.put(buffer + kA);
    __syncthreads();  // also: nobody reads the other buffer any more
    if (depth + kDepth<T> < reduction) {
      stage_a.fetch(a, row, depth + kDepth<T>);
      stage_b.fetch(b, column, depth + kDepth<T>);
    }
    sums.template add<kDeepA, kDeepB>(buffer, buffer + kA);
    T* const used = buffer;
    buffer = other;
    other = used;
  }
  __syncthreads();
  float* c = reinterpret_cast<float*>(shared);
  sums.put(c);
  __syncthreads();
  return c;
}

template <typename T>
struct Output {
  T* data;
  int64_t pitch;
  bool vectors;  // rows begin at multiples of four elements
  bool accumulate;
};

/// The first `rows` rows and `columns` columns of the tile c.
template <typename T>
__device__ void write(const float* c, const Output<T>& output, T* to, int64_t rows, int64_t columns) {
  constexpr int kWidth = 4;
#pragma unroll 2
  for (int i = int(threadIdx.x); i < kTile * kTile / kWidth; i += kThreads) {
    const int row = i / (kTile / kWidth), column = i % (kTile / kWidth) * kWidth;
    if (row >= rows || column >= columns) continue;
    auto values = load_vector<float, kWidth>(c + row * kPaddedTile + column);
    T* at = to + row * output.pitch + column;
    if (output.vectors && column + kWidth <= columns) {
      Vector<T, kWidth> result;
      if (output.accumulate) {
        result = load_vector<T, kWidth>(at);
#pragma unroll
        for (int j = 0; j < kWidth; ++j) values[j] += to_float(result[j]);
      }
#pragma unroll
      for (int j = 0; j < kWidth; ++j) result[j] = from_float<T>(values[j]);
      store_vector(at, result);
    } else {
#pragma unroll
      for (int j = 0; j < kWidth; ++j)
        if (column + j < columns) at[j] = from_float<T>(values[j] + (output.accumulate ? to_float(at[j]) : 0.0f));
    }
  }
}

struct ExpertRows {
  int expert, first, end;  // expert is -1 where there is none
};

/// Tiles of rows are numbered expert by expert. All warps find the same.
__device__ ExpertRows rows_of_tile(const int32_t* __restrict__ offsets, int experts, int64_t tile) {
  const int lane = int(threadIdx.x) % kWarp;
  for (int group = 0; group < experts; group += kWarp) {
    const int expert = group + lane;
    const int first = expert < experts ? offsets[expert] : 0, end = expert < experts ? offsets[expert + 1] : 0;
    const int tiles = (end - first + kTile - 1) / kTile, up_to_here = prefix_sum_warp(tiles);
    const unsigned behind = __ballot_sync(kAllLanes, up_to_here > tile);
    if (behind != 0) {
      const int owner = __ffs(int(behind)) - 1;
      const int first_of_tile = first + int(tile - (up_to_here - tiles)) * kTile;
      return {group + owner, __shfl_sync(kAllLanes, first_of_tile, owner), __shfl_sync(kAllLanes, end, owner)};
    }
    tile -= __shfl_sync(kAllLanes, up_to_here, kWarp - 1);
  }
  return {-1, 0, 0};
}

/// x [R,in], y [R,out]. w [L,out,in] where lines of w are deep, else [L,in,out].
template <typename T, bool kDeepW>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce<T>)
    rows_kernel(Operand<T> x, Operand<T> w, Output<T> y, const int32_t* offsets, int experts, int64_t out_columns,
                int column_tiles) {
  __shared__ alignas(128) std::byte shared[kSharedBytes];
  const ExpertRows rows = rows_of_tile(offsets, experts, blockIdx.x / unsigned(column_tiles));
  if (rows.expert < 0) return;
  const int64_t column = int64_t(blockIdx.x % unsigned(column_tiles)) * kTile;
  w.data += rows.expert * w.lines * w.pitch;
  x.lines = rows.end;
  const float* c = multiply<T, true, kDeepW>(x, w, rows.first, column, x.columns, shared);
  write(c, y, y.data + rows.first * y.pitch + column, rows.end - rows.first, out_columns - column);
}

template <typename T, typename Gradient>
__global__ void __launch_bounds__(kThreads, kBlocksAtOnce<T>)
    weight_kernel(Operand<T> dy, Operand<T> x, Output<Gradient> dw, const int32_t* offsets, int row_tiles,
                  int column_tiles) {
  __shared__ alignas(128) std::byte shared[kSharedBytes];
  const unsigned matrix = blockIdx.x / unsigned(column_tiles);
  const int64_t column = int64_t(blockIdx.x % unsigned(column_tiles)) * kTile;
  const int64_t row = int64_t(matrix % unsigned(row_tiles)) * kTile, expert = matrix / unsigned(row_tiles);
  const int64_t first = offsets[expert], rows = offsets[expert + 1] - first;
  if (rows == 0 && dw.accumulate) return;
  dy.data += first * dy.pitch;
  x.data += first * x.pitch;
  dy.lines = x.lines = rows;
  const float* c = multiply<T, false, false>(dy, x, row, column, rows, shared);
  write(c, dw, dw.data + (expert * dy.columns + row) * dw.pitch + column, dy.columns - row, x.columns - column);
}

template <typename T>
Operand<T> operand(const Tensor& tensor, int64_t lines) {
  const bool aligned = reinterpret_cast<uintptr_t>(tensor.data) % 16 == 0 && tensor.pitch % kVectorWidth<T> == 0;
  return {pointer<const T>(tensor), tensor.pitch, lines, tensor.columns(), aligned};
}

template <typename T>
Output<T> output(const Tensor& tensor, Write write) {
  const bool aligned = reinterpret_cast<uintptr_t>(tensor.data) % (4 * sizeof(T)) == 0 && tensor.pitch % 4 == 0;
  return {pointer<T>(tensor), tensor.pitch, aligned, write == Write::accumulate};
}

}  // namespace

void portable_grouped_rows(cudaStream_t stream, const Tensor& x, const Tensor& w_LNK, Transpose tw,
                           const Tensor& offsets_L1, const Tensor& y) {
  const int64_t experts = offsets_L1.elements() - 1, rows = y.rows(), columns = y.columns();
  if (rows == 0 || experts == 0) return;
  expects(w_LNK.shape.rank() == 3 && w_LNK.shape[0] == experts && x.dtype == w_LNK.dtype && x.dtype == y.dtype &&
              w_LNK.shape[tw == Transpose::yes ? 1 : 2] == columns &&
              w_LNK.shape[tw == Transpose::yes ? 2 : 1] == x.columns(),
          "grouped product of {} with {} into {}", x.shape, w_LNK.shape, y.shape);
  const int64_t column_tiles = ceil_div(columns, kTile), blocks = (rows / kTile + experts) * column_tiles;
  with_real(x.dtype, [&]<typename T>(T) {
    const auto kernel = tw == Transpose::yes ? rows_kernel<T, true> : rows_kernel<T, false>;
    launch(kernel, blocks, kThreads, 0, stream, operand<T>(x, 0), operand<T>(w_LNK, w_LNK.shape[1]),
           output<T>(y, Write::overwrite), offsets_L1.as<int32_t>(), int(experts), columns, int(column_tiles));
  });
}

void portable_grouped_weight(cudaStream_t stream, const Tensor& dy_RN, const Tensor& x_RK, const Tensor& offsets_L1,
                             const Tensor& dw_LNK, Write write) {
  const int64_t experts = offsets_L1.elements() - 1;
  if (dw_LNK.elements() == 0) return;
  expects(dw_LNK.shape.rank() == 3 && dw_LNK.shape[0] == experts && dy_RN.columns() == dw_LNK.shape[1] &&
              x_RK.columns() == dw_LNK.shape[2] && dy_RN.dtype == x_RK.dtype,
          "grouped weight gradient of {} and {} into {}", dy_RN.shape, x_RK.shape, dw_LNK.shape);
  const int64_t row_tiles = ceil_div(dw_LNK.shape[1], kTile), column_tiles = ceil_div(dw_LNK.shape[2], kTile);
  with_real(x_RK.dtype, [&]<typename T>(T) {
    with_real(dw_LNK.dtype, [&]<typename Gradient>(Gradient) {
      launch(weight_kernel<T, Gradient>, experts * row_tiles * column_tiles, kThreads, 0, stream, operand<T>(dy_RN, 0),
             operand<T>(x_RK, 0), output<Gradient>(dw_LNK, write), offsets_L1.as<int32_t>(), int(row_tiles),
             int(column_tiles));
    });
  });
}

}  // namespace optimus::cuda
