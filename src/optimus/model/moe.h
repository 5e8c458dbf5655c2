// The Mixture-of-Experts layer:
//
//   pre-norm:   y = x + sum_k gate_Tk * expert_{id_Tk}(n) + shared(n),  n = norm(x)
//   post-norm:  y = x + norm(sum_k gate_Tk * expert_{id_Tk}(x) + shared(x))
//
// expert_e(n) = down_e(silu(gate_e(n)) * up_e(n)). Rows are gathered by expert, the products are grouped, and the gates
// are applied to the activation, which is linear behind them: then the experts' outputs need only be summed, and neither
// they nor their gradients are kept for the gates' gradient (dgate = <activation, gradient of the activation>).
//
// T tokens, D hidden, E experts, K top_k, R = T*K routed rows, F expert width.
#pragma once

#include <optional>

#include "optimus/model/mlp.h"
#include "optimus/model/router.h"

namespace optimus {

struct MoeSaved {  // forward -> backward
  Tensor x_TD, norm_statistics, input_TD, h_R2F;
  RouterSaved router;
  RouteIndex route;
  GatedMlp::Saved shared;
};
struct MoeDeferred {  // backward_input -> backward_weight
  Tensor doutput_TD, doutput_RD, dh_R2F, a_RF;
  RouterDeferred router;
  GatedMlp::Deferred shared;
};

class MoeLayer {
 public:
  MoeLayer(const ModelConfig& model, ParameterTable& table, int64_t layer);

  /// counts_UE and prob_sums_UE receive this layer's part of the balance.
  void forward(Context& c, Tensor x_TD, Tensor y_TD, int64_t tokens_per_unit, Tensor counts_UE, Tensor prob_sums_UE,
               const LossSums& sums, MoeSaved& saved) const;
  void backward_input(Context& c, Tensor dy_TD, Tensor dx_TD, int64_t tokens_per_unit, Tensor balance_UE,
                      const LossScales& scales, const MoeSaved& saved, MoeDeferred& deferred) const;
  void backward_weight(Context& c, const MoeSaved& saved, const MoeDeferred& deferred) const;

 private:
  void experts_forward(Context& c, Tensor x_TD, Tensor addend_TD, Tensor y_TD, MoeSaved& saved) const;
  Tensor routed_rows(const MoeSaved& saved) const;

  MoeConfig moe_;
  bool post_norm_;
  Norm norm_;
  Router router_;
  ParameterId gate_up_, down_;
  std::optional<GatedMlp> shared_;
};

}  // namespace optimus
