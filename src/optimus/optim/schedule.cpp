#include "optimus/optim/schedule.h"

#include <algorithm>
#include <cmath>
#include <numbers>

namespace optimus {

double learning_rate(const OptimizerConfig& optimizer, int64_t step) {
  const double lr = optimizer.lr, min = *optimizer.min_lr;
  const int64_t warmup = *optimizer.warmup_steps, end = *optimizer.decay_steps;
  if (step < warmup) return min + (lr - min) * double(step) / double(warmup);
  if (optimizer.schedule == "constant") return lr;
  const int64_t begin = optimizer.schedule == "wsd" ? std::max(warmup, end - std::max<int64_t>(1, end / 10)) : warmup;
  if (step < begin) return lr;
  if (step >= end) return min;
  const double progress = double(step - begin) / double(end - begin);
  if (optimizer.schedule == "cosine") return min + (lr - min) * (1.0 + std::cos(std::numbers::pi * progress)) / 2.0;
  return lr + (min - lr) * progress;
}

}  // namespace optimus
