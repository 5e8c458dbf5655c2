// The engine: weights, gradients, optimizer and router state of one rank, and what is done with them: one training step,
// an evaluation, inference. It knows neither files nor time. Made over a dry device, the very same code plans memory and
// counts FLOPs.
//
// One step, for micro-batches m = 0 .. M-1 of the global batch:
//   forward (losses, head gradients), backward (gradients: the first micro-batch overwrites, the others accumulate),
//   then one norm over all gradients, one clip coefficient, one AdamW update selected by the finite flag.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "optimus/comm/communicator.h"
#include "optimus/data/loader.h"
#include "optimus/model/model.h"
#include "optimus/optim/optimizer.h"
#include "optimus/train/config.h"

namespace optimus {

/// Capacities of the engine's arenas in bytes; -1 = unbounded (dry device).
struct EngineMemory {
  int64_t persistent = -1;
  int64_t saved = -1;
  int64_t workspace = -1;
  int64_t total() const { return persistent + saved + workspace; }
};

/// What the engine is made for: only training has an optimizer, only the first two have gradients.
enum class EngineUse {
  train,
  gradients,   ///< forward and backward of one micro-batch (eval --gradients)
  evaluation,  ///< cross-entropy and logits of batches of up to micro_batch sequences
  generation,  ///< one cached sequence of up to model.sequence tokens
};

/// What the host learns of a step, in plain numbers.
struct StepResult {
  double loss = 0, cross_entropy = 0, balance_loss = 0, z_loss = 0;
  double gradient_norm = 0;
  bool finite = true;
  std::vector<std::vector<double>> expert_counts;  ///< one vector a MoE layer
};

/// A flat f32 buffer in the layout of the parameter table; its tensors are named prefix + parameter.
struct FlatState {
  std::string prefix;
  Tensor flat;
};

class Engine {
 public:
  Engine(const RunConfig& config, EngineUse use, Device& device, std::unique_ptr<Ops> ops, const EngineMemory& memory);

  const RunConfig& config() const { return config_; }
  const ParameterTable& table() const { return table_; }
  Device& device() { return device_; }

  /// Weights drawn by Philox, keyed by seed, parameter name and element: the same in every layout.
  void initialise(uint64_t seed);
  /// The weights as training keeps them: the f32 master weights, or the compute weights where there is no optimizer.
  Tensor master_weights() const;
  Tensor gradients() const { return parameters_.gradients; }
  /// Both moments. Training only.
  std::vector<FlatState> moments() const;
  /// The last step's expert counts f32 [N,E] where the next step depends on them (balance_unit "global"), else empty.
  Tensor carried_counts() const;
  /// After master_weights() was overwritten: makes the compute weights follow.
  void refresh_weights();

  /// One update, from the rank's part of the global batch. `step` counts from 0.
  void step(int64_t step, const HostBatch& batch);
  /// The last step's result; the host waits for it.
  StepResult result_wait();

  /// Whether every weight is finite: an update of finite numbers can still overflow.
  bool weights_finite_wait();
  /// After a step that was not finite, whose update was not made: the rest of the state as before it, too.
  void forget_step();

  /// Forward and backward of a whole batch as one micro-batch; gradients stay in gradients().
  StepResult gradients_wait(const HostBatch& batch);
  /// Losses of a whole batch as one micro-batch, without touching any state. Logits go to `sink` where given.
  StepResult evaluate_wait(const HostBatch& batch, const LogitsSink& sink = {});

  /// Appends tokens to the cached sequence; returns the logits after the last one.
  std::vector<float> decode_wait(const std::vector<int32_t>& tokens);
  void reset_caches();

  /// Bytes in use at most so far, all arenas.
  int64_t peak_bytes() const { return persistent_.peak() + saved_.peak() + workspace_.peak(); }
  EngineMemory peak_memory() const { return {persistent_.peak(), saved_.peak(), workspace_.peak()}; }
  std::map<std::string, int64_t> peak_segments() const;

 private:
  Context context(Write write);
  MicroBatch upload(const HostBatch& batch);
  MicroBatch micro_batch(const MicroBatch& whole, int64_t first_sequence, int64_t sequences) const;
  LossSums loss_sums() const { return {sums_.slice(0, 1), sums_.slice(1, 1), sums_.slice(2, 1)}; }
  RouterLoad router_load() const { return {step_counts_NE_, previous_counts_NE_}; }
  /// Losses to zero; the last step's expert counts become the previous ones.
  void begin_sums();

  RunConfig config_;
  Device& device_;
  std::unique_ptr<Ops> ops_;
  std::unique_ptr<Communicator> world_;
  Arena persistent_, saved_, workspace_;
  ParameterTable table_;
  Model model_;
  ParameterBuffers parameters_;
  std::unique_ptr<Optimizer> optimizer_;
  Tensor tokens_, targets_, positions_, weights_;  // i32, i32, i32, f32 [tokens of the largest batch]
  Tensor sums_;                                    // f64 [4]: cross-entropy, balance, z, squares
  Tensor control_;                                 // f32 [kControlSize]
  Tensor step_counts_NE_, previous_counts_NE_;     // f32
  LossScales scales_;
  std::vector<KvCache> caches_;
};

/// Memory and work of one step, found by running it dry.
struct EnginePlan {
  EngineMemory memory;
  std::map<std::string, int64_t> segments;  ///< bytes at each arena's peak
  double step_flops = 0;                    ///< of the products of one step, all micro-batches
};
EnginePlan plan_engine(const RunConfig& config, EngineUse use);

/// Throws Error(kMemory) naming the largest segments when the plan does not fit the device.
void check_fits(const EnginePlan& plan, const Device& device);

/// For a run on this machine. Throws Error(kMemory) naming the largest segments when the plan does not fit the device.
std::unique_ptr<Engine> make_engine(const RunConfig& config, EngineUse use, Device& device, const EnginePlan& plan);

/// The tensor's values on the host, bf16 widened; the host waits for the device.
std::vector<float> read_floats_wait(Device& device, Tensor tensor);

}  // namespace optimus
