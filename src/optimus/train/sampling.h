// Choosing the next token from logits: temperature, then nucleus (top-p) sampling.
#pragma once

#include <cstdint>
#include <vector>

namespace optimus {

struct SamplingConfig {
  double temperature = 1.0;  ///< 0: the most likely token
  double top_p = 1.0;        ///< only the most likely tokens that together reach this probability
  uint64_t seed = 1;
};

/// The token number `index` of a generation: a pure function of its arguments. Among equal logits the lower id is first.
int32_t sample_token(const SamplingConfig& config, const std::vector<float>& logits, int64_t index);

}  // namespace optimus
