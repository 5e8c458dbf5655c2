// The assembled decoder:  embedding -> [attention, MLP or MoE] x layers -> final norm, head, loss.
//
// forward() runs the layers and, with the head, the loss and the head's gradients; backward() takes the layers in
// reverse, input gradient and weight gradient of each side by side.
#pragma once

#include <optional>
#include <vector>

#include "optimus/model/attention.h"
#include "optimus/model/embedding.h"
#include "optimus/model/head.h"
#include "optimus/model/mlp.h"
#include "optimus/model/moe.h"

namespace optimus {

/// One transformer block: attention, then the dense MLP or the experts.
struct Block {
  Block(const ModelConfig& model, ParameterTable& table, int64_t layer);

  Attention attention;
  std::optional<MlpLayer> mlp;
  std::optional<MoeLayer> moe;
};

struct BlockSaved {
  AttentionSaved attention;
  MlpSaved mlp;
  MoeSaved moe;
};

struct ModelSaved {
  std::vector<BlockSaved> blocks;
  BalanceSaved balance;
  Tensor dx_TD;  ///< gradient at the last block's output, left by the head
};

/// Expert load of a step, on the device; empty without experts.  N MoE layers.
struct RouterLoad {
  Tensor step_counts_NE;      ///< f32, this step's slots per expert so far
  Tensor previous_counts_NE;  ///< f32, the previous step's (balance_unit "global")
};

class Model {
 public:
  Model(const ModelConfig& config, ParameterTable& table);

  const ModelConfig& config() const { return config_; }
  const Balance* balance() const { return balance_ ? &*balance_ : nullptr; }

  /// Training: losses are added to `sums`, gradients of the head are done, saved is ready for backward().
  void forward(Context& c, const MicroBatch& batch, const LossScales& scales, const LossSums& sums,
               const RouterLoad& load, ModelSaved& saved) const;
  void backward(Context& c, const MicroBatch& batch, const LossScales& scales, ModelSaved& saved) const;

  /// Evaluation: losses are added to `sums` where batch has targets, logits go to `sink` where given; keeps nothing, and
  /// leaves load.step_counts_NE alone. `caches` (one a layer, or null) continue a sequence; see KvCache.
  void infer(Context& c, const MicroBatch& batch, const LossScales& scales, const LossSums& sums,
             const RouterLoad& load, const LogitsSink& sink, std::vector<KvCache>* caches = nullptr) const;

 private:
  void block_forward(Context& c, const MicroBatch& batch, int64_t layer, Tensor x_TD, Tensor middle_TD, Tensor y_TD,
                     const LossSums& sums, const BalanceSaved& balance, BlockSaved& saved, KvCache* cache) const;

  ModelConfig config_;
  Embedding embedding_;
  std::vector<Block> blocks_;
  Head head_;
  std::optional<Balance> balance_;
};

}  // namespace optimus
