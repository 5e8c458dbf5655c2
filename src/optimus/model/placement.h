// Which part of the model one stage of one rank holds.
#pragma once

#include <cstdint>

namespace optimus {

struct ModelConfig;

struct Placement {
  int64_t first_layer = 0, layers = 0;    ///< blocks
  bool embedding = true;                  ///< the first stage
  bool head = true;                       ///< the last stage: final norm, output projection, loss
  int64_t first_expert = 0, experts = 0;  ///< of every MoE layer

  /// The whole model.
  static Placement whole(const ModelConfig& model);
};

}  // namespace optimus
