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

/// Load and balance of one micro-batch on one stage, gathered layer by layer in forward and turned into gradients before
/// backward. N MoE layers of the stage; A = N, or 1 in scope "model", where all layers have the same gradient.
struct BalanceSaved {
  Tensor counts_NUE;     ///< f32, slots of each unit that chose e
  Tensor prob_sums_NUE;  ///< f32
  Tensor gradient_AUE;   ///< f32, d loss / d probability; scope "model": set before backward
  Tensor gradient(int64_t layer) const { return gradient_AUE[gradient_AUE.shape[0] == 1 ? 0 : layer]; }
};

/// In scope "model" the loss is one over all layers' summed counts and probabilities. Between the stages of a pipeline
/// they travel forward as sums so far (f32 [2,U,E]: counts, probabilities); the last stage has them all, and its gradient
/// travels back (f32 [U,E]).
class Balance {
 public:
  /// first_layer, layers: the stage's MoE layers, of `all_layers` in the model, counted among themselves.
  Balance(const MoeConfig& moe, int64_t first_layer, int64_t layers, int64_t all_layers);

  bool whole_model() const { return moe_.balance == "loss" && moe_.balance_scope == "model"; }
  int64_t units(const MicroBatch& batch) const { return per_sequence_ ? batch.sequences : 1; }
  int64_t tokens_per_unit(const MicroBatch& batch) const { return batch.tokens() / units(batch); }
  /// Units in a global batch of that many sequences.
  double units_in(int64_t sequences, int64_t micro_batches) const {
    return double(per_sequence_ ? sequences : micro_batches);
  }

  /// Before the stage's first router.
  void begin(Context& c, const MicroBatch& batch, BalanceSaved& saved) const;
  /// After the stage's last router: adds the micro-batch's counts to step_counts (f32 [all layers, E]; empty: not
  /// training). In scope "layer": adds to sums.balance and fills the gradient.
  /// previous_counts (f32 [all layers, E]) holds the previous step's, for balance_unit "global".
  void finish(Context& c, const MicroBatch& batch, const LossScales& scales, const LossSums& sums,
              Tensor previous_counts, Tensor step_counts, BalanceSaved& saved) const;

  // Scope "model" only.
  /// to_2UE = from_2UE (empty: zeros) + the stage's own sums.
  void pass_on(Context& c, const BalanceSaved& saved, Tensor from_2UE, Tensor to_2UE) const;
  /// On the last stage, from the sums of all stages: adds to sums.balance and sets the gradient.
  void finish_model(Context& c, const MicroBatch& batch, const LossScales& scales, const LossSums& sums,
                    Tensor previous_counts, Tensor totals_2UE, Tensor gradient_UE) const;

 private:
  double scale(const LossScales& scales, double layers_together) const;

  MoeConfig moe_;
  int64_t first_layer_, layers_, all_layers_;
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
