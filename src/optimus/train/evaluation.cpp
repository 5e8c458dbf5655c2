#include "optimus/train/evaluation.h"

#include <numeric>

namespace optimus {

Evaluation evaluate_windows_wait(Engine& engine, const EvalWindows& windows, int64_t sequences) {
  double sum = 0, weight = 0;
  for (int64_t first = 0; first < windows.windows(); first += sequences) {
    const HostBatch batch = windows.batch(first, std::min(sequences, windows.windows() - first));
    const double batch_weight = std::accumulate(batch.weights.begin(), batch.weights.end(), 0.0);
    sum += engine.evaluate_wait(batch).cross_entropy * batch_weight;
    weight += batch_weight;
  }
  return {sum / weight, weight};
}

}  // namespace optimus
