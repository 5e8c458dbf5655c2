// The learning rate as a pure function of the step. With s counted from 0, W warm-up steps and E = decay_steps:
//
//   s < W       min + (lr - min) * s/W
//   cosine      min + (lr - min) * (1 + cos(pi (s - W)/(E - W)))/2,  then min
//   linear      lr + (min - lr) * (s - W)/(E - W),                    then min
//   wsd         lr until the last tenth of E ("warm-up, stable, decay"), then linearly to min at E
//   constant    lr
#pragma once

#include "optimus/optim/config.h"

namespace optimus {

/// `optimizer` is resolved (min_lr, warmup_steps and decay_steps are set).
double learning_rate(const OptimizerConfig& optimizer, int64_t step);

}  // namespace optimus
