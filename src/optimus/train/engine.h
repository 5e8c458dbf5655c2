// The engine: weights, gradients, optimizer and router state of one rank, and what is done with them: one training step,
// an evaluation, inference. It knows neither files nor time. Made over a dry device, the very same code plans memory,
// counts FLOPs and messages, and simulates one rank of thousands.
//
// One step: the pipeline takes the micro-batches of the rank's part of the global batch forward and backward (gradients:
// the first overwrites, the others accumulate; complete buckets are reduced meanwhile), then one norm over all gradients
// of all ranks, one clip coefficient, one AdamW update of the rank's shards selected by the finite flag.
//
// Every call that computes is collective: all ranks make it, in the same order.
#pragma once

#include <map>
#include <memory>
#include <string>
#include <vector>

#include "optimus/comm/groups.h"
#include "optimus/data/loader.h"
#include "optimus/optim/optimizer.h"
#include "optimus/parallel/pipeline.h"
#include "optimus/train/config.h"

namespace optimus {

/// Capacities of the engine's arenas in bytes; -1 = unbounded (dry device).
struct EngineMemory {
  int64_t persistent = -1;
  int64_t slot = -1;  ///< of one micro-batch in flight
  int64_t slots = 1;
  int64_t workspace = -1;
  int64_t fixed = 0;  ///< outside of arenas: the kernels' scratch
  int64_t total() const { return persistent + slots * slot + workspace + fixed; }
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

class Engine : private LayerEvents {
 public:
  Engine(const RunConfig& config, EngineUse use, Device& device, std::unique_ptr<Ops> ops, Groups groups,
         const EngineMemory& memory);

  const RunConfig& config() const { return config_; }
  const ParameterTable& table() const { return table_; }
  Device& device() { return device_; }

  /// Weights drawn by Philox, keyed by seed, parameter name and element: the same in every layout.
  void initialise(uint64_t seed);
  const Groups& groups() const { return groups_; }
  const Schedule& schedule() const { return pipeline_.schedule(); }
  /// The weights as training keeps them: the f32 master weights (a rank's shards), or the compute weights where there is
  /// no optimizer.
  FlatState master_weights() const;
  /// Calls write(values, first) for pieces that cover [first, first + count) of a state's buffer, a part of a range held,
  /// and keeps what it put there; read_state() shows the same pieces. `values` are of the state's type.
  void write_state(const FlatState& state, int64_t first, int64_t count, const Optimizer::Piece& write);
  void read_state(const FlatState& state, int64_t first, int64_t count, const Optimizer::Piece& read);
  /// All weights and gradients that the rank holds, in the table's layout. After a step a gradient is the sum over all
  /// ranks where the rank's optimizer needs it, see optimizer.h.
  Tensor weights() const { return parameters_.weights; }
  Tensor gradients() const { return parameters_.gradients; }
  /// Both moments. Training only.
  std::vector<FlatState> moments() const;
  /// The last step's expert counts f32 [N,E] where the next step depends on them (balance_unit "global"), else empty.
  Tensor carried_counts() const;
  /// After the master weights were written: makes the compute weights of all ranks follow.
  void refresh_weights();

  /// See Ops::choices().
  std::string choices() const { return ops_->choices(); }
  bool set_choices(const std::string& text) { return ops_->set_choices(text); }
  void start_tuning_wait() { ops_->start_tuning_wait(); }

  /// The last update's weights have arrived from the ranks that made them (the next step waits by itself).
  void weights_wait() {
    if (optimizer_) optimizer_->finish_weights();
  }

  /// One update, from the rank's part of the global batch. `step` counts from 0.
  void step(int64_t step, const HostBatch& batch);
  /// Called before every action of the pipeline, and at the end of its schedule with nothing; for traces.
  std::function<void(const Action*)> on_action;
  /// For traces: dry steps take the waves of a dispatcher that only unbalanced experts need.
  bool further_waves = true;
  /// The last step's result; the host waits for it.
  StepResult result_wait();

  /// Sum of the targets' weights of the last batch, over all ranks.
  double target_weight() const { return scales_.target_weight; }

  /// Whether every weight is finite: an update of finite numbers can still overflow.
  bool weights_finite_wait();
  /// After a step that was not finite, whose update was not made: the rest of the state as before it, too.
  void forget_step();

  /// Forward and backward of a whole batch as one micro-batch; gradients stay in gradients().
  StepResult gradients_wait(const HostBatch& batch);
  /// Losses of a whole batch as one micro-batch, over all ranks' batches (of one size), without touching any state. Logits
  /// of the rank's own batch go to `sink` where given.
  StepResult evaluate_wait(const HostBatch& batch, const LogitsSink& sink = {});

  /// Appends tokens to the cached sequence; returns the logits after the last one.
  std::vector<float> decode_wait(const std::vector<int32_t>& tokens);
  void reset_caches();

  /// Bytes in use at most so far, all arenas.
  int64_t peak_bytes() const { return peak_memory().total(); }
  EngineMemory peak_memory() const {
    return {persistent_.peak(), pipeline_.slot_peak(), pipeline_.slots(), workspace_.peak(), ops_->fixed_bytes()};
  }
  std::map<std::string, int64_t> peak_segments() const;

 private:
  void weights_needed(int64_t layer) override;
  void gradients_ready(int64_t layer) override;
  void layer_begins(int64_t layer) override;
  Pipeline make_pipeline(EngineUse use, int64_t slot_capacity);
  std::unique_ptr<TokenDispatcher> make_dispatcher();
  Context context(Arena& saved, Arena* deferred, int micro_batch);
  Pipeline::MakeContext contexts();
  MicroBatch upload(const HostBatch& batch, int64_t micro_batches);
  MicroBatch micro_batch(const MicroBatch& whole, int64_t first_sequence, int64_t sequences) const;
  LossSums loss_sums() const { return {sums_.slice(0, 1), sums_.slice(1, 1), sums_.slice(2, 1)}; }
  const Balance* balance() const { return pipeline_.stages().front().balance(); }
  void forward_backward(const HostBatch& batch);
  void update(int64_t step);
  /// Losses to zero; the last step's expert counts become the previous ones.
  void begin_sums();
  /// Names what follows in profilers, by action and layer.
  void name_timeline();
  /// Where the step is, for errors of communication.
  std::string position() const;
  /// The sums of all ranks.
  void reduce_sums();

  RunConfig config_;
  Device& device_;
  std::unique_ptr<Ops> ops_;
  Groups groups_;
  Arena persistent_, workspace_;
  ParameterTable table_;
  std::unique_ptr<TokenDispatcher> dispatcher_;
  Pipeline pipeline_;
  ParameterBuffers parameters_;
  std::unique_ptr<Optimizer> optimizer_;
  Tensor tokens_, targets_, positions_, weights_;  // i32, i32, i32, f32 [tokens of the largest batch]
  Tensor sums_;                                    // f64 [4]: cross-entropy, balance, z, squares
  Tensor control_;                                 // f32 [kControlSize]
  Tensor step_counts_, previous_counts_;           // f32 [MoE layers, E]
  LossScales scales_;
  int micro_batches_ = 1;         ///< of the batch that was uploaded last
  std::optional<Action> action_;  ///< of the step under way
  int64_t layer_ = -1;            ///< that began last
  bool training_ = false;         ///< a step is under way
  std::vector<KvCache> caches_;
};

/// The tensor's values on the host, bf16 widened; the host waits for the device.
std::vector<float> read_floats_wait(Device& device, Tensor tensor);

}  // namespace optimus
