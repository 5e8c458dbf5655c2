// The whole configuration of a run: one struct a section, read from TOML and `--set`, resolved once, written back into
// run.dir/config.toml and into every checkpoint.
#pragma once

#include <string>
#include <vector>

#include "optimus/comm/mesh.h"
#include "optimus/data/config.h"
#include "optimus/model/config.h"
#include "optimus/optim/config.h"
#include "optimus/parallel/config.h"
#include "optimus/tensor/device.h"
#include "optimus/tensor/dtype.h"

namespace optimus {

struct TrainConfig {
  int64_t steps = 0;
  int64_t tokens = 0;         ///< instead of steps: rounded up to whole steps
  int64_t global_batch = 32;  ///< sequences a step
  int64_t micro_batch = 0;    ///< sequences; 0 before resolve: global_batch / dp, at most 8
  int64_t seed = 1;
  int64_t log_every = 10;
  int64_t eval_every = 0;
  int64_t eval_sequences = 0;
  std::string init_from;

  template <typename V>
  void fields(V& v) {
    v("steps", steps);
    v("tokens", tokens);
    v("global_batch", global_batch);
    v("micro_batch", micro_batch);
    v("seed", seed);
    v("log_every", log_every);
    v("eval_every", eval_every);
    v("eval_sequences", eval_sequences);
    v("init_from", init_from);
  }
};

struct PrecisionConfig {
  std::string compute;  ///< "" before resolve: f32 on a CPU, bf16 on a GPU
  std::string gradients = "f32";
  std::string moments = "f32";

  template <typename V>
  void fields(V& v) {
    v("compute", compute, {"f32", "bf16"});
    v("gradients", gradients, {"f32", "bf16"});
    v("moments", moments, {"f32", "bf16"});
  }
};

struct MemoryConfig {
  std::vector<std::string> recompute;
  std::vector<std::string> offload;
  double moe_rows = 1.25;

  template <typename V>
  void fields(V& v) {
    v("recompute", recompute);
    v("offload", offload);
    v("moe_rows", moe_rows);
  }
};

struct CheckpointConfig {
  int64_t every = 0;
  int64_t keep = 2;
  bool async = false;
  int64_t model_only_every = 0;

  template <typename V>
  void fields(V& v) {
    v("every", every);
    v("keep", keep);
    v("async", async);
    v("model_only_every", model_only_every);
  }
};

struct RunSection {
  std::string dir;              ///< "" before resolve: runs/<configuration's name>
  std::string device = "auto";  ///< after resolve "cpu" or "cuda"
  bool deterministic = true;

  template <typename V>
  void fields(V& v) {
    v("dir", dir);
    v("device", device, {"auto", "cpu", "cuda"});
    v("deterministic", deterministic);
  }
};

struct RunConfig {
  ModelConfig model;
  DataConfig data;
  TrainConfig train;
  OptimizerConfig optimizer;
  ParallelConfig parallel;
  PrecisionConfig precision;
  MemoryConfig memory;
  CheckpointConfig checkpoint;
  RunSection run;
  MeshShape mesh;  ///< from the number of ranks and [parallel]; not a key

  template <typename V>
  void fields(V& v) {
    v.table("model", model);
    v.table("data", data);
    v.table("train", train);
    v.table("optimizer", optimizer);
    v.table("parallel", parallel);
    v.table("precision", precision);
    v.table("memory", memory);
    v.table("checkpoint", checkpoint);
    v.table("run", run);
  }

  /// Sequences of the global batch that one rank of a dp group reads, and the micro-batches they make.
  int64_t local_batch() const { return train.global_batch / mesh.dp; }
  int64_t micro_batches() const { return local_batch() / train.micro_batch; }
  int64_t tokens_per_step() const { return train.global_batch * model.sequence; }
  DeviceKind device_kind() const { return run.device == "cuda" ? DeviceKind::cuda : DeviceKind::cpu; }
  DType compute_dtype() const { return precision.compute == "bf16" ? DType::bf16 : DType::f32; }
  DType moment_dtype() const { return precision.moments == "bf16" ? DType::bf16 : DType::f32; }
  DType gradient_dtype() const { return precision.gradients == "bf16" ? DType::bf16 : DType::f32; }
};

/// What a configuration is loaded for: `plan` and `bench` need neither data nor a number of steps.
enum class ConfigUse { train, shape };

/// Reads, overrides (`section.key=value`, the value in TOML or else a string), fills defaults and checks. The model of
/// `train.init_from` is the base of the model section. `ranks`: how many the run has, 0 for the fewest that its layout
/// needs. Throws Error(kUsage) naming file and key.
RunConfig load_config(const std::string& path, const std::vector<std::string>& overrides, ConfigUse use,
                      int64_t ranks = 1);

/// The same for a configuration given as TOML text; `name` serves messages and run.dir.
RunConfig parse_config(const std::string& text, const std::string& name, const std::vector<std::string>& overrides,
                       ConfigUse use, int64_t ranks = 1);

std::string to_toml(RunConfig config);

}  // namespace optimus
