// The gradient of RMS and layer normalisation. With x_hat = (x - mean) r and g = dy * weight:
//   dx = r (g - mean(g) [layer only] - x_hat mean(g x_hat)) + addend
//   dweight = sum over rows and groups of dy x_hat,  dbias = the same of dy.
//
// Blocks take ranges of vectors that depend on the shape alone. Each thread meets the same columns in all of its
// vectors and sums their parameter gradients; the blocks' sums are added in order by a second kernel.
#include "optimus/ops/cuda/norm.cuh"

namespace optimus::cuda {
namespace {

constexpr int kTeamsThreads = 256;         // of blocks that hold several teams
constexpr int kResidentThreads = 768;      // a multiprocessor's, as registers allow
constexpr int kVectorsAtOnce = 2;          // a team's vectors in flight
constexpr int64_t kMultiprocessors = 132;  // that grids are made for, on any device: sums depend on them

template <typename T>
struct BackwardArguments {
  Vectors vectors;
  unsigned chunk;  ///< vectors of a block
  bool layer;
  Matrix<const T> x;
  const T* weight;
  Matrix<float> statistics;
  Matrix<const T> dy, addend;
  Matrix<T> dx;
  float* partials;  ///< of each block: `sums` rows of W, dweight's and dbias's; null where neither is wanted
  int sums;
};

/// A thread has one unit of each vector of its team, kVectorsAtOnce of them in flight.
template <typename T, bool kOfBlock>
__global__ void __launch_bounds__(kOfBlock ? kResidentThreads : kTeamsThreads, kOfBlock ? 1 : 3)
    norm_backward_kernel(BackwardArguments<T> a, int lane_bits) {
  constexpr int N = kVectorWidth<T>, kValues = 2 * kVectorsAtOnce;
  const int lanes = kOfBlock ? int(blockDim.x) : 1 << lane_bits;
  const int unit = kOfBlock ? int(threadIdx.x) : int(threadIdx.x) & (lanes - 1);
  const unsigned teams = kOfBlock ? 1 : kTeamsThreads >> lane_bits;
  const unsigned team = kOfBlock ? 0 : threadIdx.x >> lane_bits;
  const bool has_unit = unit < int(a.vectors.width) / N;
  const unsigned begin = blockIdx.x * a.chunk, end = min(begin + a.chunk, a.vectors.count);
  const float inverse_width = 1.0f / float(a.vectors.width);

  float dweight[N] = {}, dbias[N] = {};
  Unit<T> weight;
#pragma unroll
  for (int j = 0; j < N; ++j) weight[j] = from_float<T>(1.0f);
  if (a.weight && has_unit) weight = load_parameter<T, N>(a.weight + unit * N);

  int buffer = 0;
  for (unsigned first = begin; first < end; first += teams * kVectorsAtOnce) {
    Unit<T> x[kVectorsAtOnce], dy[kVectorsAtOnce], addend[kVectorsAtOnce];
    float mean[kVectorsAtOnce], r[kVectorsAtOnce], sums[kValues];
#pragma unroll
    for (int v = 0; v < kVectorsAtOnce; ++v) {
      const unsigned vector = first + unsigned(v) * teams + team;
      const bool inside = vector < end && has_unit;
      const Vectors::Place place = a.vectors[vector];
      x[v] = load_or_zero(inside, a.vectors.in(a.x, place) + unit * N);
      dy[v] = load_or_zero(inside, a.vectors.in(a.dy, place) + unit * N);
      addend[v] = load_or_zero(inside && a.addend.data, a.vectors.in(a.addend, place) + unit * N);
      const float* statistics = statistics_at(a.statistics, place);
      mean[v] = inside ? statistics[0] : 0.0f;
      r[v] = inside ? statistics[1] : 0.0f;
    }
#pragma unroll
    for (int v = 0; v < kVectorsAtOnce; ++v) {
      float sum = 0.0f, projection = 0.0f;
      keep_packed<T>(weight);
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float d = to_float(dy[v][j]), x_hat = (to_float(x[v][j]) - mean[v]) * r[v], g = d * to_float(weight[j]);
        sum += g;
        projection += g * x_hat;
        dweight[j] += d * x_hat;
        dbias[j] += d;
      }
      sums[2 * v] = sum;
      sums[2 * v + 1] = projection;
    }
    if constexpr (kOfBlock) {
      // Two buffers: when one is written again, every thread has passed the other's barrier, after reading this one.
      __shared__ alignas(16) float warps[2][kResidentThreads / kWarp][kValues];
      const int warp = int(threadIdx.x) / kWarp, count = int(blockDim.x) / kWarp;
#pragma unroll
      for (int i = 0; i < kValues; ++i) sums[i] = reduce_warp(sums[i], Sum{});
      if (threadIdx.x % kWarp == 0) {
#pragma unroll
        for (int i = 0; i < kValues; ++i) warps[buffer][warp][i] = sums[i];
      }
      __syncthreads();
#pragma unroll
      for (int i = 0; i < kValues; ++i) sums[i] = 0.0f;
      for (int w = 0; w < count; ++w)
#pragma unroll
        for (int i = 0; i < kValues; ++i) sums[i] += warps[buffer][w][i];
      buffer ^= 1;
    } else {
#pragma unroll
      for (int i = 0; i < kValues; ++i) sums[i] = sum_lanes(sums[i], lanes);
    }
#pragma unroll
    for (int v = 0; v < kVectorsAtOnce; ++v) {
      const unsigned vector = first + unsigned(v) * teams + team;
      if (vector >= end || !has_unit) continue;
      keep_packed<T>(x[v]);
      keep_packed<T>(dy[v]);
      keep_packed<T>(addend[v]);
      keep_packed<T>(weight);
      const float mean_gradient = a.layer ? sums[2 * v] * inverse_width : 0.0f;
      const float mean_projection = sums[2 * v + 1] * inverse_width;
      Unit<T> dx;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float x_hat = (to_float(x[v][j]) - mean[v]) * r[v];
        const float d = r[v] * (to_float(dy[v][j]) * to_float(weight[j]) - mean_gradient - x_hat * mean_projection);
        dx[j] = from_float<T>(d + to_float(addend[v][j]));
      }
      store_vector(a.vectors.in(a.dx, a.vectors[vector]) + unit * N, dx);
    }
  }

  if (!a.partials) return;
  float* out = a.partials + int64_t(blockIdx.x) * a.sums * a.vectors.width;
  if constexpr (kOfBlock) {
    if (!has_unit) return;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      out[unit * N + j] = dweight[j];
      if (a.sums > 1) out[int64_t(a.vectors.width) + unit * N + j] = dbias[j];
    }
  } else {
    __shared__ alignas(16) float of_teams[kTeamsThreads * N];
    for (int s = 0; s < a.sums; ++s) {
      __syncthreads();
#pragma unroll
      for (int j = 0; j < N; ++j) of_teams[int(threadIdx.x) * N + j] = s == 0 ? dweight[j] : dbias[j];
      __syncthreads();
      for (unsigned c = threadIdx.x; c < a.vectors.width; c += kTeamsThreads) {
        float sum = 0.0f;
        for (unsigned t = 0; t < teams; ++t) sum += of_teams[t * unsigned(lanes) * N + c];
        out[unsigned(s) * a.vectors.width + c] = sum;
      }
    }
  }
}

/// to[0..N) (+)= values.
template <int N>
__device__ void add_partial(float* to, const float (&values)[N], bool first) {
  constexpr int kPart = N < 4 ? N : 4;
#pragma unroll
  for (int part = 0; part < N; part += kPart) {
    Vector<float, kPart> sum = {};
    if (!first) sum = load_vector<float, kPart>(to + part);
#pragma unroll
    for (int j = 0; j < kPart; ++j) sum[j] += values[part + j];
    store_vector(to + part, sum);
  }
}

/// A block a vector; a column's parameter gradients are summed in the block's partials, always by the same thread.
template <typename T, int N>
__global__ void __launch_bounds__(kWideThreads) norm_backward_wide_kernel(BackwardArguments<T> a) {
  const unsigned units = a.vectors.width / N;
  const unsigned begin = blockIdx.x * a.chunk, end = min(begin + a.chunk, a.vectors.count);
  const float inverse_width = 1.0f / float(a.vectors.width);
  float* partials = a.partials + (a.partials ? int64_t(blockIdx.x) * a.sums * a.vectors.width : 0);
  for (unsigned vector = begin; vector < end; ++vector) {
    const Vectors::Place place = a.vectors[vector];
    const T* x_row = a.vectors.in(a.x, place);
    const T* dy_row = a.vectors.in(a.dy, place);
    const float* statistics = statistics_at(a.statistics, place);
    const float mean = statistics[0], r = statistics[1];
    float sum = 0.0f, projection = 0.0f;
    for (unsigned unit = threadIdx.x; unit < units; unit += blockDim.x) {
      const auto x = load_vector<T, N>(x_row + unit * N), dy = load_vector<T, N>(dy_row + unit * N);
      Vector<T, N> weight = {};
      if (a.weight) weight = load_parameter<T, N>(a.weight + unit * N);
      float dweight[N], dbias[N];
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float d = to_float(dy[j]), x_hat = (to_float(x[j]) - mean) * r;
        const float g = a.weight ? d * to_float(weight[j]) : d;
        sum += g;
        projection += g * x_hat;
        dweight[j] = d * x_hat;
        dbias[j] = d;
      }
      if (a.partials) add_partial(partials + unit * N, dweight, vector == begin);
      if (a.partials && a.sums > 1) add_partial(partials + a.vectors.width + unit * N, dbias, vector == begin);
    }
    sum = reduce_block(sum, Sum{});
    projection = reduce_block(projection, Sum{});
    const float mean_gradient = a.layer ? sum * inverse_width : 0.0f, mean_projection = projection * inverse_width;
    const T* add = a.addend.data ? a.vectors.in(a.addend, place) : nullptr;
    T* out = a.vectors.in(a.dx, place);
    for (unsigned unit = threadIdx.x; unit < units; unit += blockDim.x) {
      const auto x = load_vector<T, N>(x_row + unit * N), dy = load_vector<T, N>(dy_row + unit * N);
      Vector<T, N> weight = {}, addend = {};
      if (a.weight) weight = load_parameter<T, N>(a.weight + unit * N);
      if (add) addend = load_vector<T, N>(add + unit * N);
      Vector<T, N> dx;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float x_hat = (to_float(x[j]) - mean) * r, d = to_float(dy[j]);
        const float g = a.weight ? d * to_float(weight[j]) : d;
        float gradient = r * (g - mean_gradient - x_hat * mean_projection);
        if (add) gradient += to_float(addend[j]);
        dx[j] = from_float<T>(gradient);
      }
      store_vector(out + unit * N, dx);
    }
  }
}

/// gradient (+)= the blocks' sums. A warp takes every 32nd block for 32 columns, then the first one adds the warps'.
template <typename G>
__global__ void __launch_bounds__(1024) parameter_gradients_kernel(const float* partials, int blocks, int columns,
                                                                   int width, bool accumulate, G* dweight, G* dbias) {
  __shared__ float warps[32][kWarp];
  const int lane = int(threadIdx.x) % kWarp, warp = int(threadIdx.x) / kWarp;
  const int column = int(blockIdx.x) * kWarp + lane;
  float sum = 0.0f;
  if (column < columns) {
#pragma unroll 8
    for (int block = warp; block < blocks; block += 32) sum += partials[int64_t(block) * columns + column];
  }
  warps[warp][lane] = sum;
  __syncthreads();
  if (warp > 0 || column >= columns) return;
  for (int i = 1; i < 32; ++i) sum += warps[i][lane];
  G* gradient = column < width ? dweight : dbias;
  if (!gradient) return;
  G& to = gradient[column < width ? column : column - width];
  to = from_float<G>(accumulate ? to_float(to) + sum : sum);
}

}  // namespace

void CudaOps::norm_backward(NormKind kind, int64_t groups, Tensor x, Tensor weight, Tensor statistics, Tensor dy,
                            Tensor addend, Tensor dx, Tensor dweight, Tensor dbias, Write write) {
  const Vectors vectors = vectors_of(x, groups);
  const int64_t count = vectors.count, width = vectors.width, sums = dbias ? 2 : dweight ? 1 : 0;
  scratch_.begin();
  int64_t blocks = 0;
  float* partials = nullptr;
  with_real(x.dtype, [&](auto type) {
    using T = decltype(type);
    const int64_t units = width / kVectorWidth<T>;
    const bool whole = whole_units(width, x.dtype, {x, weight, dy, addend, dx});
    const bool wide = !whole || units > kResidentThreads, of_block = !wide && units > kWarp;
    const int lane_bits = lane_bits_for(units);
    const int threads = wide       ? std::min(kWideThreads, whole_warps(whole ? units : width))
                        : of_block ? whole_warps(units)
                                   : kTeamsThreads;
    const int64_t step = wide ? 1 : kVectorsAtOnce * (of_block ? 1 : kTeamsThreads >> lane_bits);
    // As many blocks as are resident at once, which fill the device, and no more partial sums than there is room for.
    int64_t most = kMultiprocessors * std::max(1, (wide ? 2 * kWideThreads : kResidentThreads) / std::max(threads, 64));
    if (sums > 0) most = std::min(most, kScratchBytes / (sums * width * int64_t(sizeof(float))));
    const int64_t chunk = std::max<int64_t>(1, ceil_div(ceil_div(count, most), step)) * step;
    blocks = ceil_div(count, chunk);
    if (sums > 0) partials = scratch_.take<float>(blocks * sums * width);

    const BackwardArguments<T> arguments{vectors,
                                         unsigned(chunk),
                                         kind == NormKind::layer,
                                         Matrix<const T>(x),
                                         pointer<const T>(weight),
                                         Matrix<float>(statistics),
                                         Matrix<const T>(dy),
                                         Matrix<const T>(addend),
                                         Matrix<T>(dx),
                                         partials,
                                         int(sums)};
    if (!whole) return launch(norm_backward_wide_kernel<T, 1>, blocks, threads, 0, stream_, arguments);
    if (wide) return launch(norm_backward_wide_kernel<T, kVectorWidth<T>>, blocks, threads, 0, stream_, arguments);
    const auto kernel = of_block ? norm_backward_kernel<T, true> : norm_backward_kernel<T, false>;
    launch(kernel, blocks, threads, 0, stream_, arguments, lane_bits);
  });
  if (sums == 0) return;
  with_real(dweight ? dweight.dtype : dbias.dtype, [&](auto type) {
    using G = decltype(type);
    launch(parameter_gradients_kernel<G>, ceil_div(sums * width, kWarp), 1024, 0, stream_, partials, int(blocks),
           int(sums * width), int(width), write == Write::accumulate, pointer<G>(dweight), pointer<G>(dbias));
  });
}

}  // namespace optimus::cuda
