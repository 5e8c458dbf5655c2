// RMS and layer normalisation of groups of W columns:
//   y = (x - mean) r weight + bias + addend,  r = 1/sqrt(mean((x - mean)^2) + eps),  mean = 0 for rms.
#include "optimus/ops/cuda/norm.cuh"

namespace optimus::cuda {
namespace {

constexpr int kTeamsThreads = 128;   // of blocks that hold several teams
constexpr int kBlockUnits = 4;       // units a thread where a block has one vector
constexpr int kBlockThreads = 1024;  // at most, there

template <typename T>
struct NormArguments {
  Vectors vectors;
  bool layer;
  float eps;
  Matrix<const T> x;
  const T* weight;
  const T* bias;
  Matrix<const T> addend;
  Matrix<T> y;
  Matrix<float> statistics;
};

/// kOfBlock: the team is the block; else 2^lane_bits lanes, and a block has several.
template <typename T, int kUnits, bool kOfBlock>
__global__ void __launch_bounds__(kOfBlock ? kBlockThreads : kTeamsThreads, kOfBlock ? 1 : 8)
    norm_kernel(NormArguments<T> a, int lane_bits) {
  constexpr int N = kVectorWidth<T>;
  const int lanes = kOfBlock ? int(blockDim.x) : 1 << lane_bits;
  const int lane = kOfBlock ? int(threadIdx.x) : int(threadIdx.x) & (lanes - 1);
  const unsigned vector =
      kOfBlock ? blockIdx.x : blockIdx.x * (kTeamsThreads >> lane_bits) + (threadIdx.x >> lane_bits);
  const bool active = vector < a.vectors.count;
  const Vectors::Place place = a.vectors[vector];
  const int units = active ? int(a.vectors.width) / N : 0;
  const T* in = a.vectors.in(a.x, place);
  const T* add = a.addend.data ? a.vectors.in(a.addend, place) : nullptr;
  const auto sum_team = [lanes](float value) {
    if constexpr (kOfBlock) return reduce_block(value, Sum{});
    else return sum_lanes(value, lanes);
  };

  Unit<T> x[kUnits];
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const int unit = lane + i * lanes;
    x[i] = load_or_zero(unit < units, in + unit * N);
  }

  const float inverse_width = 1.0f / float(a.vectors.width);
  float mean = 0.0f;
  if (a.layer) {
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < kUnits; ++i)
#pragma unroll
      for (int j = 0; j < N; ++j) sum += to_float(x[i][j]);
    mean = sum_team(sum) * inverse_width;
#pragma unroll
    for (int i = 0; i < kUnits; ++i) keep_packed<T>(x[i]);
  }
  float squares = 0.0f;
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    if (lane + i * lanes >= units) continue;
#pragma unroll
    for (int j = 0; j < N; ++j) {
      const float centred = to_float(x[i][j]) - mean;
      squares += centred * centred;
    }
  }
  const float r = 1.0f / sqrtf(sum_team(squares) * inverse_width + a.eps);
  if (active && lane == 0) {
    float* statistics = statistics_at(a.statistics, place);
    statistics[0] = mean;
    statistics[1] = r;
  }

  T* out = a.vectors.in(a.y, place);
#pragma unroll
  for (int i = 0; i < kUnits; ++i) {
    const int unit = lane + i * lanes;
    if (unit >= units) continue;
    keep_packed<T>(x[i]);
    // Only now: registers for it earlier would halve the number of rows in flight.
    const Unit<T> addend = load_or_zero(add != nullptr, add + unit * N);
    float normed[N];
#pragma unroll
    for (int j = 0; j < N; ++j) normed[j] = (to_float(x[i][j]) - mean) * r;
    if (a.weight) {
      const auto weight = load_parameter<T, N>(a.weight + unit * N);
#pragma unroll
      for (int j = 0; j < N; ++j) normed[j] *= to_float(weight[j]);
    }
    if (a.bias) {
      const auto bias = load_parameter<T, N>(a.bias + unit * N);
#pragma unroll
      for (int j = 0; j < N; ++j) normed[j] += to_float(bias[j]);
    }
    Unit<T> y;
#pragma unroll
    for (int j = 0; j < N; ++j) y[j] = from_float<T>(normed[j] + to_float(addend[j]));
    store_vector(out + unit * N, y);
  }
}

template <typename T>
__global__ void __launch_bounds__(kWideThreads) norm_wide_kernel(NormArguments<T> a) {
  const Vectors::Place place = a.vectors[blockIdx.x];
  const T* in = a.vectors.in(a.x, place);
  const T* add = a.addend.data ? a.vectors.in(a.addend, place) : nullptr;
  T* out = a.vectors.in(a.y, place);
  const float inverse_width = 1.0f / float(a.vectors.width);
  float mean = 0.0f;
  if (a.layer) {
    float sum = 0.0f;
    for (unsigned i = threadIdx.x; i < a.vectors.width; i += blockDim.x) sum += to_float(in[i]);
    mean = reduce_block(sum, Sum{}) * inverse_width;
  }
  float squares = 0.0f;
  for (unsigned i = threadIdx.x; i < a.vectors.width; i += blockDim.x) {
    const float centred = to_float(in[i]) - mean;
    squares += centred * centred;
  }
  const float r = 1.0f / sqrtf(reduce_block(squares, Sum{}) * inverse_width + a.eps);
  if (threadIdx.x == 0) {
    float* statistics = statistics_at(a.statistics, place);
    statistics[0] = mean;
    statistics[1] = r;
  }
  for (unsigned i = threadIdx.x; i < a.vectors.width; i += blockDim.x) {
    float normed = (to_float(in[i]) - mean) * r;
    if (a.weight) normed *= to_float(a.weight[i]);
    if (a.bias) normed += to_float(a.bias[i]);
    if (add) normed += to_float(add[i]);
    out[i] = from_float<T>(normed);
  }
}

}  // namespace

void CudaOps::norm(NormKind kind, float eps, int64_t groups, Tensor x, Tensor weight, Tensor bias, Tensor addend,
                   Tensor y, Tensor statistics) {
  const Vectors vectors = vectors_of(x, groups);
  with_real(x.dtype, [&](auto type) {
    using T = decltype(type);
    const NormArguments<T> arguments{vectors,
                                     kind == NormKind::layer,
                                     eps,
                                     Matrix<const T>(x),
                                     pointer<const T>(weight),
                                     pointer<const T>(bias),
                                     Matrix<const T>(addend),
                                     Matrix<T>(y),
                                     Matrix<float>(statistics)};
    const int64_t count = vectors.count, width = vectors.width, units = width / kVectorWidth<T>;
    if (!whole_units(width, x.dtype, {x, weight, bias, addend, y}) || units > kBlockThreads * kBlockUnits) {
      const int threads = std::min(kWideThreads, whole_warps(width));
      return launch(norm_wide_kernel<T>, count, threads, 0, stream_, arguments);
    }
    if (units > 8 * kWarp) {
      const int threads = whole_warps(ceil_div(units, kBlockUnits));
      return launch(norm_kernel<T, kBlockUnits, true>, count, threads, 0, stream_, arguments, 0);
    }
    const int lane_bits = lane_bits_for(units);
    const int64_t blocks = ceil_div(count, kTeamsThreads >> lane_bits);
    const auto kernel = units <= kWarp       ? norm_kernel<T, 1, false>
                        : units <= 2 * kWarp ? norm_kernel<T, 2, false>
                        : units <= 4 * kWarp ? norm_kernel<T, 4, false>
                                             : norm_kernel<T, 8, false>;
    launch(kernel, blocks, kTeamsThreads, 0, stream_, arguments, lane_bits);
  });
}

}  // namespace optimus::cuda
