#include "optimus/train/sampling.h"

#include <algorithm>
#include <cmath>
#include <numeric>

#include "optimus/base/philox.h"

namespace optimus {

int32_t sample_token(const SamplingConfig& config, const std::vector<float>& logits, int64_t index) {
  std::vector<int32_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  if (config.temperature == 0) return int32_t(std::max_element(logits.begin(), logits.end()) - logits.begin());
  std::stable_sort(order.begin(), order.end(),
                   [&](int32_t a, int32_t b) { return logits[size_t(a)] > logits[size_t(b)]; });
  std::vector<double> weights;
  double total = 0;
  for (int32_t id : order)
    total += weights.emplace_back(
        std::exp((double(logits[size_t(id)]) - double(logits[size_t(order[0])])) / config.temperature));

  // The nucleus: the shortest prefix whose share reaches top_p.
  double nucleus = 0;
  size_t kept = 0;
  while (kept < weights.size() && (kept == 0 || nucleus < config.top_p * total)) nucleus += weights[kept++];

  uint32_t words[4];
  philox_for(config.seed, "generate")(uint64_t(index), 0, words);
  double threshold = double(to_uniform(words[0])) * nucleus;
  for (size_t i = 0; i < kept; ++i)
    if ((threshold -= weights[i]) < 0) return order[i];
  return order[kept - 1];
}

}  // namespace optimus
