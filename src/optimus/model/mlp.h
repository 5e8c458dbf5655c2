// The gated MLP (SwiGLU):  down(silu(gate(x)) * up(x)), gate and up fused in one matrix [2F, D], gate first.
//
//   GatedMlp   the bare function, also used for shared experts
//   MlpLayer   pre-norm:  y = x + mlp(norm(x));   post-norm:  y = x + norm(mlp(x))
//
// T tokens, D hidden, F width.
#pragma once

#include "optimus/model/norm.h"

namespace optimus {

class GatedMlp {
 public:
  struct Saved {
    Tensor h_T2F;
  };  // pre-activations
  struct Deferred {
    Tensor dh_T2F, a_TF;
  };  // their gradient; the activation again

  GatedMlp(const ModelConfig& model, ParameterTable& table, const std::string& name, int64_t width, int64_t layer);

  /// y = mlp(x) + addend.
  void forward(Context& c, Tensor x_TD, Tensor addend_TD, Tensor y_TD, Saved& saved) const;
  /// dx = gradient + addend.
  void backward_input(Context& c, Tensor dy_TD, Tensor addend_TD, Tensor dx_TD, const Saved& saved,
                      Deferred& deferred) const;
  void backward_weight(Context& c, Tensor dy_TD, Tensor x_TD, const Deferred& deferred) const;

 private:
  int64_t width_;
  ParameterId gate_up_, down_;
};

struct MlpSaved {
  Tensor x_TD, norm_statistics, input_TD;
  GatedMlp::Saved mlp;
};
struct MlpDeferred {
  Tensor doutput_TD;
  GatedMlp::Deferred mlp;
};

class MlpLayer {
 public:
  MlpLayer(const ModelConfig& model, ParameterTable& table, int64_t layer);

  void forward(Context& c, Tensor x_TD, Tensor y_TD, MlpSaved& saved) const;
  void backward_input(Context& c, Tensor dy_TD, Tensor dx_TD, const MlpSaved& saved, MlpDeferred& deferred) const;
  void backward_weight(Context& c, const MlpSaved& saved, const MlpDeferred& deferred) const;

 private:
  bool post_norm_;
  Norm norm_;
  GatedMlp mlp_;
};

}  // namespace optimus
