// cos and sin of position * theta^(-2i/W), kept between calls since the same few thousand positions return in every
// layer, sequence and step.
#pragma once

#include <cstdint>
#include <vector>

namespace optimus::cpu {

class RopeTable {
 public:
  /// Covers positions [0, positions) of a head of `head_dim`; what is there already is kept.
  void reserve(int64_t positions, int64_t head_dim, float theta);
  /// The W/2 cosines of a position, followed by its W/2 sines.
  const float* at(int64_t position) const { return values_.data() + position * head_dim_; }

 private:
  int64_t head_dim_ = 0;
  float theta_ = 0.0f;
  std::vector<float> values_;
};

}  // namespace optimus::cpu
