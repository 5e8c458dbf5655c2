// The engine's state to and from checkpoints: f32 master weights in weights.safetensors, the moments as they are (f32 or
// bf16; a run of the other type converts them as it loads) in m.safetensors and v.safetensors, the expert counts that the next step needs (balance_unit "global") in router.safetensors. Every rank
// writes what it owns and reads what it holds, whatever layout wrote it. All functions that take an engine are
// collective; an error of one rank is thrown on all.
#pragma once

#include <functional>
#include <string>

#include "optimus/checkpoint/checkpoint.h"
#include "optimus/train/engine.h"

namespace optimus {

/// Commits the state after `step` updates as a folder; see CheckpointWriter. `origin`, where not empty, is a checkpoint of
/// the same model that was imported or descends from an import: where it came from (dtype, tokenizer files) is passed on,
/// so that an export gives it back. Error(kData).
/// `sections` is the run's configuration for the manifest.
void save_state(Engine& engine, const fs::path& folder, int64_t step, nlohmann::json sections, const fs::path& origin,
                Processes& processes);

/// Weights only (the start of a run, evaluation, generation). Error(kData) naming the tensor.
void load_weights(Engine& engine, Checkpoint& checkpoint, Processes& processes);
void load_weights(Engine& engine, Checkpoint& checkpoint);  ///< of one process
/// Everything: the engine continues as if it had never stopped.
void load_state(Engine& engine, Checkpoint& checkpoint, Processes& processes);

/// Error(kUsage) naming the first key in which `config` differs from the checkpoint's run where it may not: model, data
/// order, seed, sequence, global batch.
void check_same_run(const RunConfig& config, const Checkpoint& checkpoint);
/// Error(kUsage) when the training data behind the same paths has another number of windows.
void check_same_data(const Loader& loader, const Checkpoint& checkpoint);

/// The choices of algorithms that the run was saved with, see Ops::choices(); "" for none. Error(kData).
std::string tuning_of(const Checkpoint& checkpoint);
/// All ranks take the choices that the first one reads, or, with a warning, none: replicas must compute alike.
void take_choices(Engine& engine, const std::function<std::string()>& read, Processes& processes);

}  // namespace optimus
