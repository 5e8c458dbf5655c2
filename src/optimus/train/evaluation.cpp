#include "optimus/train/evaluation.h"

#include "optimus/comm/together.h"

namespace optimus {

Evaluation evaluate_windows_wait(Engine& engine, const EvalWindows& windows, int64_t sequences, Processes& processes) {
  const int64_t ranks = engine.groups().dp->size(), rank = engine.groups().dp->rank(), total = windows.windows();
  double sum = 0, weight = 0;
  for (int64_t begin = 0; begin < total;) {
    // All ranks bring equally many; those that find fewer left repeat some with weights of zero.
    const int64_t count = std::min(sequences, (total - begin + ranks - 1) / ranks);
    const int64_t first = std::min(begin + rank * count, total), mine = std::min(count, total - first);
    HostBatch batch;
    together(processes, [&] {
      batch = windows.batch(std::min(first, total - count), count);
      std::fill_n(batch.weights.begin(), (count - mine) * batch.sequence_length, 0.0f);
    });
    const StepResult result = engine.evaluate_wait(batch);
    sum += result.cross_entropy * engine.target_weight();
    weight += engine.target_weight();
    begin += ranks * count;
  }
  return {sum / weight, weight};
}

}  // namespace optimus
