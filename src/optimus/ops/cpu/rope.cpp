// Rotary position embedding, half-split: with angle a_i = position * theta^(-2i/W), each head's pair (x_i, x_{i+W/2})
// becomes (x_i cos a_i - x_{i+W/2} sin a_i, x_{i+W/2} cos a_i + x_i sin a_i); backward turns by -a_i.
#include <algorithm>
#include <cmath>

#include "optimus/ops/cpu/cpu_ops.h"

namespace optimus::cpu {

void RopeTable::reserve(int64_t positions, int64_t head_dim, float theta) {
  if (head_dim != head_dim_ || theta != theta_) {
    values_.clear();
    head_dim_ = head_dim;
    theta_ = theta;
  }
  const int64_t half = head_dim / 2;
  const int64_t known = int64_t(values_.size()) / head_dim;
  if (positions <= known) return;
  values_.resize(size_t(positions * head_dim));
  parallel_ranges(half, 64 * (positions - known), [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      const double frequency = std::pow(double(theta), -2.0 * double(i) / double(head_dim));
      for (int64_t position = known; position < positions; ++position) {
        const double angle = double(position) * frequency;
        values_[size_t(position * head_dim + i)] = float(std::cos(angle));
        values_[size_t(position * head_dim + half + i)] = float(std::sin(angle));
      }
    }
  });
}

void CpuOps::rope(Tensor x, Tensor positions_T, int64_t heads, float theta, RopeDirection direction, Tensor y) {
  const int64_t tokens = x.rows();
  if (tokens == 0) return;
  const int64_t head_dim = x.columns() / heads, half = head_dim / 2;
  expects(head_dim * heads == x.columns() && head_dim % 2 == 0, "rope of {} columns in {} heads", x.columns(), heads);
  const int32_t* positions = positions_T.as<int32_t>();
  const auto [first, last] = std::minmax_element(positions, positions + tokens);
  expects(*first >= 0, "rope at position {}", *first);
  rope_table_.reserve(*last + 1, head_dim, theta);

  const float sign = direction == RopeDirection::forward ? 1.0f : -1.0f;
  with_real(x.dtype, [&]<typename T>(T) {
    const Rows<T> source(x), target(y);
    parallel_ranges(tokens, 2 * x.columns(), [&](int64_t begin, int64_t end) {
      for (int64_t t = begin; t < end; ++t) {
        const float* cosines = rope_table_.at(positions[t]);
        const float* sines = cosines + half;
        for (int64_t h = 0; h < heads; ++h) {
          const T* from = source[t] + h * head_dim;
          T* to = target[t] + h * head_dim;
#pragma omp simd
          for (int64_t i = 0; i < half; ++i) {
            const float low = float(from[i]), high = float(from[half + i]);
            const float c = cosines[i], s = sign * sines[i];
            store(to[i], low * c - high * s);
            store(to[half + i], high * c + low * s);
          }
        }
      }
    });
  });
}

}  // namespace optimus::cpu
