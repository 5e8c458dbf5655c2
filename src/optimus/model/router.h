// The router: which experts a token goes to, with which gates, and how strongly balance pulls.
//
//   logits = x W^T (f32);  probabilities = softmax(logits);  experts = top-k of them;  gates = their probabilities
//
// Balance loss (see docs/training.md): f_e = mean slots per token that chose e, p_e = mean probability, over one
// unit (micro-batch, sequence, or f from the previous step's whole batch) of one layer, or of all layers together:
//
//   balance = E * sum_e f_e p_e     (K at perfect balance, 1 when divided by K)
//   z       = mean over tokens of logsumexp(logits)^2, summed over layers
//
// T tokens, E experts, K top_k, U units in a micro-batch, N MoE layers.
#pragma once

#include "optimus/model/config.h"
#include "optimus/model/context.h"

namespace optimus {

struct RouterSaved {
  Tensor logits_TE, probs_TE, gates_TK, ids_TK, lse_T;
};
struct RouterDeferred {
  Tensor dlogits_TE;
};  // in the compute type

/// Load and balance of one micro-batch, gathered layer by layer in forward and turned into gradients before backward.
struct BalanceSaved {
  Tensor counts_NUE;     ///< f32, slots of each unit that chose e
  Tensor prob_sums_NUE;  ///< f32
  Tensor gradient_NUE;   ///< f32, d loss / d probability; all layers alike in scope "model"
};

class Balance {
 public:
  Balance(const MoeConfig& moe, int64_t moe_layers);

  int64_t units(const MicroBatch& batch) const { return per_sequence_ ? batch.sequences : 1; }
  int64_t tokens_per_unit(const MicroBatch& batch) const { return batch.tokens() / units(batch); }
  /// Units in a global batch of that many sequences.
  double units_in(int64_t sequences, int64_t micro_batches) const {
    return double(per_sequence_ ? sequences : micro_batches);
  }

  /// Before the first layer's router.
  void begin(Context& c, const MicroBatch& batch, BalanceSaved& saved) const;
  /// After the last layer's: adds to sums.balance, and the micro-batch's counts to step_counts_NE (empty: not training);
  /// fills the gradient.
  /// previous_counts_NE (f32) holds the previous step's counts over `tokens` tokens, for balance_unit "global".
  void finish(Context& c, const MicroBatch& batch, const LossScales& scales, const LossSums& sums,
              Tensor previous_counts_NE, Tensor step_counts_NE, BalanceSaved& saved) const;

 private:
  MoeConfig moe_;
  int64_t layers_;
  bool per_sequence_;
};

class Router {
 public:
  Router(const ModelConfig& model, ParameterTable& table, const std::string& name, int64_t layer);

  /// Fills saved, this layer's rows of the balance (counts_UE, prob_sums_UE) and adds to sums.z.
  void forward(Context& c, Tensor x_TD, int64_t tokens_per_unit, Tensor counts_UE, Tensor prob_sums_UE,
               const LossSums& sums, RouterSaved& saved) const;
  /// dx += gradient through the logits.
  void backward_input(Context& c, Tensor dgates_TK, int64_t tokens_per_unit, Tensor balance_UE,
                      const LossScales& scales, Tensor dx_TD, const RouterSaved& saved, RouterDeferred& deferred) const;
  void backward_weight(Context& c, Tensor x_TD, const RouterDeferred& deferred) const;

 private:
  RouterShape shape(int64_t tokens_per_unit) const;

  MoeConfig moe_;
  ParameterId weight_;
};

}  // namespace optimus
