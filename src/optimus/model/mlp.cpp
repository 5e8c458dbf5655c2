#include "optimus/model/mlp.h"

#include "optimus/model/linear.h"

namespace optimus {

GatedMlp::GatedMlp(const ModelConfig& model, ParameterTable& table, const std::string& name, int64_t width,
                   int64_t layer)
    : width_(width),
      gate_up_(table.add_normal(name + ".gate_up.weight", {2 * width, model.hidden}, model.init_std, layer)),
      down_(table.add_normal(name + ".down.weight", {model.hidden, width}, model.init_std, layer)) {}

void GatedMlp::forward(Context& c, Tensor x_TD, Tensor addend_TD, Tensor y_TD, Saved& saved) const {
  saved.h_T2F = c.save(c.dtype, {x_TD.rows(), 2 * width_}, "mlp");
  linear(c, x_TD, gate_up_, {}, saved.h_T2F);
  Arena::Scope scope(c.workspace);
  const Tensor a_TF = c.temporary(c.dtype, {x_TD.rows(), width_});
  c.ops.swiglu(saved.h_T2F, {}, {}, {}, a_TF);
  linear(c, a_TF, down_, addend_TD, y_TD);
}

void GatedMlp::backward_input(Context& c, Tensor dy_TD, Tensor addend_TD, Tensor dx_TD, const Saved& saved,
                              Deferred& deferred) const {
  deferred.dh_T2F = c.defer(c.dtype, saved.h_T2F.shape);
  deferred.a_TF = c.defer(c.dtype, {dy_TD.rows(), width_});
  {
    Arena::Scope scope(c.workspace);
    const Tensor da_TF = c.temporary(c.dtype, deferred.a_TF.shape);
    linear_backward_input(c, dy_TD, down_, {}, da_TF);
    c.ops.swiglu_backward(saved.h_T2F, da_TF, {}, {}, {}, deferred.dh_T2F, deferred.a_TF, {});
  }
  linear_backward_input(c, deferred.dh_T2F, gate_up_, addend_TD, dx_TD);
}

void GatedMlp::backward_weight(Context& c, Tensor dy_TD, Tensor x_TD, const Deferred& deferred) const {
  linear_backward_weight(c, dy_TD, deferred.a_TF, down_);
  linear_backward_weight(c, deferred.dh_T2F, x_TD, gate_up_);
}

MlpLayer::MlpLayer(const ModelConfig& model, ParameterTable& table, int64_t layer)
    : post_norm_(model.norm_position == "post"),
      norm_(model, table, fmt::format("layers.{}.mlp.norm", layer), layer),
      mlp_(model, table, fmt::format("layers.{}.mlp", layer), model.mlp_width, layer) {}

void MlpLayer::forward(Context& c, Tensor x_TD, Tensor y_TD, MlpSaved& saved) const {
  saved.norm_statistics = c.save(DType::f32, norm_.statistics_shape(x_TD.rows()), "norm");
  if (post_norm_) {
    saved.input_TD = x_TD;
    saved.x_TD = c.save(c.dtype, x_TD.shape, "norm");
    mlp_.forward(c, x_TD, {}, saved.x_TD, saved.mlp);
    norm_.forward(c, saved.x_TD, x_TD, y_TD, saved.norm_statistics);
  } else {
    saved.x_TD = x_TD;
    saved.input_TD = c.save(c.dtype, x_TD.shape, "norm");
    norm_.forward(c, x_TD, {}, saved.input_TD, saved.norm_statistics);
    mlp_.forward(c, saved.input_TD, x_TD, y_TD, saved.mlp);
  }
}

void MlpLayer::backward_input(Context& c, Tensor dy_TD, Tensor dx_TD, const MlpSaved& saved,
                              MlpDeferred& deferred) const {
  deferred.doutput_TD = dy_TD;
  if (post_norm_) {
    deferred.doutput_TD = c.defer(c.dtype, dy_TD.shape);
    norm_.backward(c, saved.x_TD, saved.norm_statistics, dy_TD, {}, deferred.doutput_TD);
    mlp_.backward_input(c, deferred.doutput_TD, dy_TD, dx_TD, saved.mlp, deferred.mlp);
  } else {
    mlp_.backward_input(c, dy_TD, {}, dx_TD, saved.mlp, deferred.mlp);
    norm_.backward(c, saved.x_TD, saved.norm_statistics, dx_TD, dy_TD, dx_TD);
  }
}

void MlpLayer::backward_weight(Context& c, const MlpSaved& saved, const MlpDeferred& deferred) const {
  mlp_.backward_weight(c, deferred.doutput_TD, saved.input_TD, deferred.mlp);
}

}  // namespace optimus
