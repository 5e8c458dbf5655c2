// config.json of Hugging Face transformers (versions 4 and 5) to and from the [model] section.
#pragma once

#include <string>

#include <nlohmann/json.hpp>

#include "optimus/checkpoint/hugging_face.h"

namespace optimus {

struct HuggingFaceModel {
  const HuggingFaceArchitecture* architecture;
  ModelConfig model;
};

/// Error(kData), one sentence naming `file` and the key, for what Optimus would compute differently: an unknown
/// model_type, biases, another activation, scaled rotary positions, a sliding window shorter than the sequence.
HuggingFaceModel read_hugging_face_config(const nlohmann::json& config, const std::string& file);

/// A config.json that both versions of transformers understand. `torch_dtype` as in "float32".
nlohmann::json make_hugging_face_config(const ModelConfig& model, const HuggingFaceArchitecture& architecture,
                                        const std::string& torch_dtype);

}  // namespace optimus
