// Rotary position embedding, half-split: with angle a_i = position * theta^(-2i/W), each head's pair (x_i, x_{i+W/2})
// becomes (x_i cos a_i - x_{i+W/2} sin a_i, x_{i+W/2} cos a_i + x_i sin a_i); backward turns by -a_i.
//
// Angles are counted in half turns, in f64, and reduced to [-1, 1] there, so that far positions lose nothing; sine and
// cosine of the rest are f32's. A block makes the table of its tokens once, for all of their heads.
#include <cmath>
#include <numbers>

#include "optimus/ops/cuda/kernels.cuh"

namespace optimus::cuda {
namespace {

constexpr int kThreads = 128;
constexpr unsigned kTokens = 4;  // of a block
constexpr int kBatch = 2;        // items in flight a thread
constexpr int64_t kSharedBytes = 48 << 10;

struct RopeShape {
  int64_t tokens;
  unsigned heads, half;        ///< half = W/2
  double exponent, frequency;  ///< half turns a position of pair i: 2^(i*exponent) * frequency
  float sign;                  ///< of the sine
};

/// N floats from shared memory, in accesses of 16 bytes.
template <int N>
__device__ void load_floats(const float* from, float (&to)[N]) {
  constexpr int kPart = N < 4 ? N : 4;
#pragma unroll
  for (int part = 0; part < N; part += kPart) {
    const auto values = load_vector<float, kPart>(from + part);
#pragma unroll
    for (int j = 0; j < kPart; ++j) to[part + j] = values[j];
  }
}

/// An item is N pairs of one head of one token. y may be x: an item is read before it is written, by one thread.
template <typename T, int N>
__global__ void __launch_bounds__(kThreads)
    rope_kernel(RopeShape shape, const T* x, int64_t x_pitch, const int32_t* positions, T* y, int64_t y_pitch) {
  extern __shared__ __align__(16) float table[];  // cosines [kTokens, half], sines [kTokens, half]
  float* cosines = table;
  float* sines = table + kTokens * shape.half;
  const int64_t first = int64_t(blockIdx.x) * kTokens;
  const unsigned tokens = unsigned(min(int64_t(kTokens), shape.tokens - first));

  for (unsigned entry = threadIdx.x; entry < tokens * shape.half; entry += kThreads) {
    const unsigned token = entry / shape.half, i = entry - token * shape.half;
    const double half_turns = double(positions[first + token]) * (exp2(double(i) * shape.exponent) * shape.frequency);
    float s, c;
    sincospif(float(half_turns - 2.0 * rint(0.5 * half_turns)), &s, &c);
    cosines[entry] = c;
    sines[entry] = s * shape.sign;
  }
  __syncthreads();

  const unsigned units = shape.half / N, of_token = shape.heads * units, items = tokens * of_token;
  for (unsigned base = threadIdx.x; base < items; base += kThreads * kBatch) {
    Vector<T, N> low[kBatch], high[kBatch];
    unsigned entry[kBatch];
    T* to[kBatch];
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      const unsigned item = base + unsigned(b) * kThreads;
      if (item >= items) continue;
      const unsigned token = item / of_token, rest = item - token * of_token;
      const unsigned head = rest / units, i = (rest - head * units) * N;
      const int64_t column = int64_t(head) * (2 * shape.half) + i;
      const T* from = x + (first + token) * x_pitch + column;
      low[b] = load_vector<T, N>(from);
      high[b] = load_vector<T, N>(from + shape.half);
      to[b] = y + (first + token) * y_pitch + column;
      entry[b] = token * shape.half + i;
    }
#pragma unroll
    for (int b = 0; b < kBatch; ++b) {
      if (base + unsigned(b) * kThreads >= items) continue;
      float c[N], s[N];
      load_floats(cosines + entry[b], c);
      load_floats(sines + entry[b], s);
      Vector<T, N> low_turned, high_turned;
#pragma unroll
      for (int j = 0; j < N; ++j) {
        const float l = to_float(low[b][j]), h = to_float(high[b][j]);
        low_turned[j] = from_float<T>(l * c[j] - h * s[j]);
        high_turned[j] = from_float<T>(h * c[j] + l * s[j]);
      }
      store_vector(to[b], low_turned);
      store_vector(to[b] + shape.half, high_turned);
    }
  }
}

}  // namespace

void CudaOps::rope(Tensor x, Tensor positions_T, int64_t heads, float theta, RopeDirection direction, Tensor y) {
  const int64_t tokens = x.rows(), head_dim = x.columns() / heads, half = head_dim / 2;
  expects(head_dim * heads == x.columns() && head_dim % 2 == 0, "rope of {} columns in {} heads", x.columns(), heads);
  const int64_t shared = 2 * int64_t(kTokens) * half * int64_t(sizeof(float));
  expects(shared <= kSharedBytes && x.columns() < (int64_t(1) << 28), "rope of {} heads of {}", heads, head_dim);
  const RopeShape shape{tokens,
                        unsigned(heads),
                        unsigned(half),
                        -2.0 * std::log2(double(theta)) / double(head_dim),
                        1.0 / std::numbers::pi,
                        direction == RopeDirection::forward ? 1.0f : -1.0f};
  with_real(x.dtype, [&](auto type) {
    using T = decltype(type);
    const bool whole = half % kVectorWidth<T> == 0 && whole_vectors(x) && whole_vectors(y);
    launch(whole ? rope_kernel<T, kVectorWidth<T>> : rope_kernel<T, 1>, ceil_div(tokens, kTokens), kThreads,
           size_t(shared), stream_, shape, pointer<const T>(x), x.pitch, positions_T.as<int32_t>(), pointer<T>(y),
           y.pitch);
  });
}

}  // namespace optimus::cuda
