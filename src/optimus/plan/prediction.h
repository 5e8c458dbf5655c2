// How long a training step takes on a kind of hardware, from what its ranks do (work.h).
//
//   kernel      max(FLOPs / rate, bytes / memory bandwidth), and the time to launch it; grouped products reach
//               rows / (rows + half) of their rate with that many rows an expert
//   messages    see links.h. Those of a dispatcher stand in the way of compute, those between stages are on their way
//               while others compute.
//   pipeline    simulate() of the schedule with these times
//   gradients   a bucket's reduction starts when the last micro-batch's backward has made it, one after the other; what
//               ends after that backward is exposed
//   weights     gathered one bucket after the other during the next step's first forward; what is waited for is exposed
//               Both are hidden behind kernels only: a link serves them or the dispatcher, not both.
//
//   step = begin + pipeline + max over stages (exposed reduction, squares) + norm of all ranks
//        + max over stages (update + exposed gathering)
//
// Routing is balanced, no rank is slower than another, and communication does not slow compute down.
#pragma once

#include "optimus/plan/hardware.h"
#include "optimus/plan/work.h"

namespace optimus {

struct Part {
  std::string name;
  double seconds = 0;  ///< of the step
  double hidden = 0;   ///< seconds more that pass while something else is computed
};

struct Prediction {
  double step_seconds = 0;
  double tokens_per_second = 0;
  double device_flops = 0;  ///< FLOP/s a device, of the model's mathematics
  double mfu = 0;
  double bubble = 0;             ///< share of the pipeline's time in which a rank computes nothing
  double optimizer_seconds = 0;  ///< reduction, norm, update and gathering of the slowest stage if nothing were hidden
  std::vector<Part> parts;       ///< slowest first; they add up to the step

  double hidden_seconds() const;
};

/// Seconds of every stage's actions.
std::vector<StageCost> stage_costs(const RunConfig& config, const std::vector<RankWork>& ranks,
                                   const Hardware& hardware);

/// Error(kUsage) for f32 compute, of which hardware files say nothing.
Prediction predict(const RunConfig& config, const std::vector<RankWork>& ranks, const Hardware& hardware);

}  // namespace optimus
