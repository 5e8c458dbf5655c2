// A Mixture-of-Experts layer (with its norm):
//
//   pre-norm:   y = x + sum_k gate_k * expert_{id_k}(norm(x)) + shared(norm(x));   post-norm: y = x + norm(the same of x)
//   expert:     down(silu(gate(x)) * up(x))
//
// Tokens go to the ranks of their experts (see token_dispatcher.h); there the (token, k) pairs with local experts become
// rows grouped by expert. A gate multiplies the activation before the down projection, which is linear, so combining is
// a plain sum. Kept for backward are the pre-activations of at most `row_capacity` rows; rows beyond run in further
// waves, whose pre-activations are recomputed in backward: imbalance costs time, never memory, never a token.
//
// T own tokens, N dispatched tokens, D hidden, E experts, L local experts, K top_k, R rows of a wave, F expert width.
#pragma once

#include <optional>

#include "optimus/model/mlp.h"
#include "optimus/model/placement.h"
#include "optimus/model/router.h"

namespace optimus {

/// The tokens that this rank's experts see.
struct ExpertTokens {
  Tensor x_ND, gates_NK, ids_NK;
};

struct MoeSaved {  // forward -> backward
  Tensor x_TD, norm_statistics, input_TD;
  RouterSaved router;
  DispatchPlan dispatch;
  ExpertTokens tokens;  // of the first wave
  RouteIndex route;     // of its first rows
  Tensor h_R2F;         // their pre-activations
  GatedMlp::Saved shared;
};
struct MoeDeferred {  // backward_input -> backward_weight
  Tensor doutput_TD;
  Tensor doutput_RD, dh_R2F, a_RF;
  GatedMlp::Deferred shared;
  RouterDeferred router;
};

class MoeLayer {
 public:
  MoeLayer(const ModelConfig& model, const Placement& placement, double row_capacity, ParameterTable& table,
           int64_t layer);

  /// Also fills this layer's rows of the balance and adds to sums.z; see router.h.
  void forward(Context& c, Tensor x_TD, Tensor y_TD, int64_t tokens_per_unit, Tensor counts_UE, Tensor prob_sums_UE,
               const LossSums& sums, MoeSaved& saved) const;
  void backward_input(Context& c, Tensor dy_TD, Tensor dx_TD, int64_t tokens_per_unit, Tensor balance_UE,
                      const LossScales& scales, const MoeSaved& saved, MoeDeferred& deferred) const;
  void backward_weight(Context& c, const MoeSaved& saved, const MoeDeferred& deferred) const;

 private:
  int64_t row_capacity(const Context& c, int64_t tokens) const;
  int64_t row_waves(const Context& c, int64_t own_tokens, int64_t dispatched) const;
  /// Whether all rows are those of the first wave, however the router chooses.
  bool one_wave(const Context& c, int64_t tokens) const;
  ExpertTokens dispatch(Context& c, const MoeSaved& saved, int64_t wave, Arena& arena) const;
  RouteIndex route(Context& c, Tensor ids_NK, int64_t own_tokens, int64_t row_wave, Arena& arena) const;

  void experts_forward(Context& c, Tensor addend_TD, Tensor y_TD, MoeSaved& saved) const;
  void rows_forward(Context& c, const ExpertTokens& tokens, const RouteIndex& route, Tensor h_R2F, Tensor addend_ND,
                    Tensor y_ND) const;
  /// dx = gradient of the rows' tokens + addend; their gates' gradients are set.
  void rows_backward(Context& c, const ExpertTokens& tokens, const RouteIndex& route, Tensor h_R2F, Tensor dy_ND,
                     Tensor addend_ND, Tensor dx_ND, Tensor dgates_NK, MoeDeferred& deferred) const;
  void rows_backward_weight(Context& c, const ExpertTokens& tokens, const RouteIndex& route,
                            const MoeDeferred& deferred, Write write) const;

  MoeConfig moe_;
  int64_t hidden_, first_expert_, experts_;
  double moe_rows_;
  bool post_norm_;
  Norm norm_;
  Router router_;
  ParameterId gate_up_, down_;
  std::optional<GatedMlp> shared_;
};

}  // namespace optimus
