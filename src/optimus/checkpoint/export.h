// From a checkpoint of ours to a Hugging Face folder: config.json, model.safetensors (or shards with their index), and
// what an import passed through. Tensors keep the imported types; those of a run of ours are F32.
#pragma once

#include <nlohmann/json.hpp>

#include "optimus/checkpoint/checkpoint.h"
#include "optimus/checkpoint/hugging_face.h"

namespace optimus {

constexpr int64_t kShardBytes = 5'000'000'000;  // as transformers cuts them

/// The architecture that the checkpoint was imported from, or the one that expresses its model.
const HuggingFaceArchitecture& architecture_of(const Checkpoint& checkpoint);
/// The model's tensors as the imported folder names them; one an expert for a checkpoint that was not imported.
std::vector<HuggingFaceTensor> hugging_face_tensors(const Checkpoint& checkpoint);

/// Returns {folder, architecture, dtype, tensors, files}. Error(kUsage) naming the key when no architecture expresses
/// the model or `out` is not empty; Error(kData) for a damaged checkpoint.
nlohmann::json export_hugging_face(Checkpoint& checkpoint, const fs::path& out, int64_t shard_bytes = kShardBytes);

}  // namespace optimus
