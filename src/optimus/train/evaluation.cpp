#include "optimus/train/evaluation.h"

#include <numeric>

namespace optimus {

Evaluation evaluate_windows_wait(Engine& engine, const EvalWindows& windows, int64_t sequences) {
  const int64_t ranks = engine.groups().dp->size(), rank = engine.groups().dp->rank(), total = windows.windows();
  double sum = 0, weight = 0;
  for (int64_t begin = 0; begin < total;) {
    // All ranks bring equally many; those that find no window left repeat one with weights of zero.
    const int64_t count = std::min(sequences, (total - begin + ranks - 1) / ranks);
    const int64_t first = std::min(begin + rank * count, total), mine = std::min(count, total - first);
    HostBatch batch = windows.batch(std::min(first, total - count), count);
    if (mine < count) {
      const auto padding = batch.weights.begin() + (count - mine) * batch.sequence_length;
      std::fill(batch.weights.begin(), mine == 0 ? batch.weights.end() : padding, 0.0f);
    }
    const StepResult result = engine.evaluate_wait(batch);
    const double batch_weight = engine.target_weight();
    sum += result.cross_entropy * batch_weight;
    weight += batch_weight;
    begin += ranks * count;
  }
  return {sum / weight, weight};
}

}  // namespace optimus
