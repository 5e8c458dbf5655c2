// The cross-entropy of a model on a validation set, in batches.
#pragma once

#include "optimus/data/loader.h"
#include "optimus/train/engine.h"

namespace optimus {

struct Evaluation {
  double loss = 0;    ///< mean cross-entropy over the targets
  double weight = 0;  ///< sum of the targets' weights
};

/// Over all windows, at most `sequences` at once on a rank; the ranks of a dp group share them. The host waits for the
/// device; no state of the engine changes. Collective; data that one rank cannot read is an Error(kData) on all.
Evaluation evaluate_windows_wait(Engine& engine, const EvalWindows& windows, int64_t sequences, Processes& processes);

}  // namespace optimus
