// From a Hugging Face folder to a checkpoint of ours: step 0, weights only, in f32, with the model's configuration, what
// the folder was ("source" in the manifest) and copies of its configuration and tokenizer files under hf/.
//
// The conversion is a checked bijection: every tensor of the folder goes somewhere, every element of every parameter
// comes from somewhere, and F32, BF16 and F16 widen to f32 exactly.
#pragma once

#include <nlohmann/json.hpp>

#include "optimus/base/file.h"

namespace optimus {

/// Returns {checkpoint, architecture, dtype, tensors, parameters}. Error(kData) naming the file, key or tensor;
/// Error(kUsage) when `out` already holds something else.
nlohmann::json import_hugging_face(const fs::path& folder, const fs::path& out);

}  // namespace optimus
