// The [optimizer] section.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace optimus {

struct OptimizerConfig {
  std::string name = "adamw";
  double lr = 4e-4;
  std::optional<double> min_lr;  ///< lr / 10
  std::string schedule = "cosine";
  std::optional<int64_t> warmup_steps;  ///< min(2500, steps / 10)
  std::optional<int64_t> decay_steps;   ///< steps
  double beta1 = 0.9;
  double beta2 = 0.95;
  double eps = 1e-8;
  double weight_decay = 0.1;
  std::string decay = "all";
  double clip_norm = 1.0;  ///< 0: no clipping
  bool clip_after_warmup = false;
  std::string sharding = "ep_aware";

  template <typename V>
  void fields(V& v) {
    v("name", name, {"adamw"});
    v("lr", lr);
    v("min_lr", min_lr);
    v("schedule", schedule, {"cosine", "wsd", "linear", "constant"});
    v("warmup_steps", warmup_steps);
    v("decay_steps", decay_steps);
    v("beta1", beta1);
    v("beta2", beta2);
    v("eps", eps);
    v("weight_decay", weight_decay);
    v("decay", decay, {"all", "matrices"});
    v("clip_norm", clip_norm);
    v("clip_after_warmup", clip_after_warmup);
    v("sharding", sharding, {"none", "dp", "ep_aware"});
  }
};

}  // namespace optimus
