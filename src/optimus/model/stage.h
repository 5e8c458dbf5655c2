// A stage: the consecutive layers of the decoder that one place in the pipeline holds,
//
//   [embedding ->] [attention, MLP or MoE] x layers [-> final norm, head, loss]
//
// the whole model where there is no pipeline. forward() runs the layers and, with the head, the loss and the head's
// gradients; backward takes the layers in reverse, input gradient and weight gradient of each side by side, or all input
// gradients first (the previous stage waits for them) and the weight gradients whenever there is time.
#pragma once

#include <optional>
#include <vector>

#include "optimus/model/attention.h"
#include "optimus/model/embedding.h"
#include "optimus/model/head.h"
#include "optimus/model/mlp.h"
#include "optimus/model/moe.h"
#include "optimus/model/placement.h"

namespace optimus {

struct BlockSaved {
  AttentionSaved attention;
  MlpSaved mlp;
  MoeSaved moe;
};
struct BlockDeferred {
  AttentionDeferred attention;
  MlpDeferred mlp;
  MoeDeferred moe;
};

/// What crosses the boundary of two stages: forward the residual stream and the balance sums so far (f32 [2,U,E]),
/// backward their gradients ([U,E] for the balance). No balance where its scope is not the model.
struct Boundary {
  Tensor x_TD;
  Tensor balance;
};

/// One micro-batch in flight on one stage.
struct StageSaved {
  Boundary input, output;                    ///< activations; no input on the first stage
  Boundary output_gradient, input_gradient;  ///< the former is received, or made by the head
  std::vector<BlockSaved> blocks;
  BalanceSaved balance;
  std::vector<BlockDeferred> deferred;  ///< with a split backward
};

/// Expert load of a step, on the device; empty without experts. All MoE layers of the model.
struct RouterLoad {
  Tensor step_counts;      ///< f32 [layers, E], this step's slots per expert so far
  Tensor previous_counts;  ///< f32, the previous step's (balance_unit "global")
};

/// What every micro-batch of a step shares.
struct LossTerms {
  LossScales scales;
  LossSums sums;
  RouterLoad load;
};

/// One transformer block: attention, then the dense MLP or the experts.
class Block {
 public:
  Block(const ModelConfig& model, const Placement& placement, double moe_rows, ParameterTable& table, int64_t layer);

  void forward(Context& c, const MicroBatch& batch, const Balance* balance, const BalanceSaved& balance_saved,
               const LossSums& sums, Tensor x_TD, Tensor middle_TD, Tensor y_TD, BlockSaved& saved,
               KvCache* cache) const;
  /// Input and weight gradients. dmiddle_TD becomes the gradient between attention and MLP; dx_TD may be dy_TD.
  void backward(Context& c, const MicroBatch& batch, const Balance* balance, const BalanceSaved& balance_saved,
                const LossScales& scales, Tensor dy_TD, Tensor dmiddle_TD, Tensor dx_TD, const BlockSaved& saved) const;
  /// The same in two steps; nothing may overwrite dy_TD and dmiddle_TD in between.
  void backward_input(Context& c, const MicroBatch& batch, const Balance* balance, const BalanceSaved& balance_saved,
                      const LossScales& scales, Tensor dy_TD, Tensor dmiddle_TD, Tensor dx_TD, const BlockSaved& saved,
                      BlockDeferred& deferred) const;
  void backward_weight(Context& c, const BlockSaved& saved, const BlockDeferred& deferred) const;

 private:
  void mlp_backward_input(Context& c, const MicroBatch& batch, const Balance* balance,
                          const BalanceSaved& balance_saved, const LossScales& scales, Tensor dy_TD, Tensor dmiddle_TD,
                          const BlockSaved& saved, BlockDeferred& deferred) const;
  void mlp_backward_weight(Context& c, const BlockSaved& saved, const BlockDeferred& deferred) const;

  int64_t moe_index_;  ///< among the MoE layers of the stage
  Attention attention_;
  std::optional<MlpLayer> mlp_;
  std::optional<MoeLayer> moe_;
};

class Stage {
 public:
  /// moe_rows: routed rows kept by a MoE layer, as a multiple of the balanced number (see moe.h).
  Stage(const ModelConfig& config, const Placement& placement, double moe_rows, ParameterTable& table);

  const Placement& placement() const { return placement_; }
  const Balance* balance() const { return balance_ ? &*balance_ : nullptr; }

  /// Makes room in c.saved for what crosses the stage's boundaries, before anything is received.
  void begin(Context& c, const MicroBatch& batch, StageSaved& saved) const;
  /// From saved.input to saved.output; losses are added to terms.sums; gradients of the head are done.
  void forward(Context& c, const MicroBatch& batch, const LossTerms& terms, StageSaved& saved) const;
  /// From saved.output_gradient to saved.input_gradient, weight gradients included.
  void backward(Context& c, const MicroBatch& batch, const LossScales& scales, StageSaved& saved) const;
  /// The same in two steps (c.split_backward()).
  void backward_input(Context& c, const MicroBatch& batch, const LossScales& scales, StageSaved& saved) const;
  void backward_weight(Context& c, const MicroBatch& batch, StageSaved& saved) const;

  /// Evaluation: from saved.input to saved.output, or to the losses and logits; keeps nothing else, and leaves
  /// terms.load.step_counts alone. `caches` (one a layer of the stage, or null) continue a sequence; see KvCache.
  void infer(Context& c, const MicroBatch& batch, const LossTerms& terms, const LogitsSink& sink, StageSaved& saved,
             KvCache* caches = nullptr) const;

 private:
  void read_input(Context& c, const MicroBatch& batch, Tensor x_TD) const;
  void head_weights_needed(Context& c) const;
  void embedding_backward(Context& c, const MicroBatch& batch, Tensor dx_TD) const;
  /// Scope "model": the gradient came with the residual's.
  void take_balance_gradient(StageSaved& saved) const;
  int64_t layer(size_t block) const { return placement_.first_layer + int64_t(block); }

  ModelConfig config_;
  Placement placement_;
  bool tied_here_;  ///< embedding and tied head are both on this stage
  ParameterId embedding_weight_;
  std::optional<Embedding> embedding_;
  std::vector<Block> blocks_;
  std::optional<Head> head_;
  std::optional<Balance> balance_;
};

/// The parameters of the whole model on one rank, laid out.
ParameterTable whole_table(const ModelConfig& config);

}  // namespace optimus
