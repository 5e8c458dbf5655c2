#include "optimus/model/moe.h"

#include "optimus/model/linear.h"

namespace optimus {
namespace {

std::optional<GatedMlp> shared_experts(const ModelConfig& model, ParameterTable& table, const std::string& name,
                                       int64_t layer) {
  if (model.shared_mlp_width() == 0) return std::nullopt;
  return GatedMlp(model, table, name + ".shared", model.shared_mlp_width(), layer);
}

}  // namespace

MoeLayer::MoeLayer(const ModelConfig& model, ParameterTable& table, int64_t layer)
    : moe_(*model.moe),
      post_norm_(model.norm_position == "post"),
      norm_(model, table, fmt::format("layers.{}.moe.norm", layer), layer),
      router_(model, table, fmt::format("layers.{}.moe", layer), layer),
      gate_up_(table.add_normal(fmt::format("layers.{}.moe.gate_up.weight", layer),
                                {moe_.experts, 2 * moe_.width, model.hidden}, model.init_std, layer,
                                ParameterClass::expert)),
      down_(table.add_normal(fmt::format("layers.{}.moe.down.weight", layer), {moe_.experts, model.hidden, moe_.width},
                             model.init_std, layer, ParameterClass::expert)),
      shared_(shared_experts(model, table, fmt::format("layers.{}.moe", layer), layer)) {}

// The number of routed rows, on the device.
Tensor MoeLayer::routed_rows(const MoeSaved& saved) const { return saved.route.offsets_L1.slice(moe_.experts, 1); }

void MoeLayer::experts_forward(Context& c, Tensor x_TD, Tensor addend_TD, Tensor y_TD, MoeSaved& saved) const {
  const int64_t T = x_TD.rows(), D = x_TD.columns(), R = T * moe_.top_k, F = moe_.width;
  saved.route.offsets_L1 = c.save(DType::i32, {moe_.experts + 1}, "router");
  saved.route.token_R = c.save(DType::i32, {R}, "router");
  saved.route.slot_R = c.save(DType::i32, {R}, "router");
  saved.route.row_ptr_T1 = c.save(DType::i32, {T + 1}, "router");
  saved.route.row_R = c.save(DType::i32, {R}, "router");
  c.ops.route(saved.router.ids_TK, 0, saved.route);

  saved.h_R2F = c.save(c.dtype, {R, 2 * F}, "experts");
  {
    Arena::Scope scope(c.workspace);
    const Tensor x_RD = c.temporary(c.dtype, {R, D});
    c.ops.gather_rows(x_TD, saved.route, x_RD);
    c.ops.grouped_matmul(x_RD, c.weight(gate_up_), saved.route.offsets_L1, saved.h_R2F);
  }
  Arena::Scope scope(c.workspace);
  const Tensor a_RF = c.temporary(c.dtype, {R, F});
  const Tensor y_RD = c.temporary(c.dtype, {R, D});
  c.ops.swiglu(saved.h_R2F, saved.router.gates_TK, saved.route.slot_R, routed_rows(saved), a_RF);
  c.ops.grouped_matmul(a_RF, c.weight(down_), saved.route.offsets_L1, y_RD);
  c.ops.combine_rows(y_RD, saved.route, addend_TD, y_TD);
}

void MoeLayer::forward(Context& c, Tensor x_TD, Tensor y_TD, int64_t tokens_per_unit, Tensor counts_UE,
                       Tensor prob_sums_UE, const LossSums& sums, MoeSaved& saved) const {
  saved.norm_statistics = c.save(DType::f32, norm_.statistics_shape(x_TD.rows()), "norm");
  Tensor addend = x_TD, output = y_TD;
  if (post_norm_) {
    saved.input_TD = x_TD;
    saved.x_TD = output = c.save(c.dtype, x_TD.shape, "norm");
    addend = {};
  } else {
    saved.x_TD = x_TD;
    saved.input_TD = c.save(c.dtype, x_TD.shape, "norm");
    norm_.forward(c, x_TD, {}, saved.input_TD, saved.norm_statistics);
  }
  router_.forward(c, saved.input_TD, tokens_per_unit, counts_UE, prob_sums_UE, sums, saved.router);
  experts_forward(c, saved.input_TD, addend, output, saved);
  if (shared_) shared_->forward(c, saved.input_TD, output, output, saved.shared);
  if (post_norm_) norm_.forward(c, output, x_TD, y_TD, saved.norm_statistics);
}

void MoeLayer::backward_input(Context& c, Tensor dy_TD, Tensor dx_TD, int64_t tokens_per_unit, Tensor balance_UE,
                              const LossScales& scales, const MoeSaved& saved, MoeDeferred& deferred) const {
  const int64_t T = dy_TD.rows(), D = dy_TD.columns(), R = T * moe_.top_k;
  deferred.doutput_TD = dy_TD;
  if (post_norm_) {
    deferred.doutput_TD = c.temporary(c.dtype, dy_TD.shape);
    norm_.backward(c, saved.x_TD, saved.norm_statistics, dy_TD, {}, deferred.doutput_TD);
  }
  deferred.doutput_RD = c.temporary(c.dtype, {R, D});
  deferred.dh_R2F = c.temporary(c.dtype, saved.h_R2F.shape);
  deferred.a_RF = c.temporary(c.dtype, {R, moe_.width});
  const Tensor dgates_TK = c.temporary(DType::f32, {T, moe_.top_k});
  c.ops.gather_rows(deferred.doutput_TD, saved.route, deferred.doutput_RD);
  {
    Arena::Scope scope(c.workspace);
    const Tensor da_RF = c.temporary(c.dtype, {R, moe_.width});
    c.ops.grouped_matmul_input(deferred.doutput_RD, c.weight(down_), saved.route.offsets_L1, da_RF);
    c.ops.swiglu_backward(saved.h_R2F, da_RF, saved.router.gates_TK, saved.route.slot_R, routed_rows(saved),
                          deferred.dh_R2F, deferred.a_RF, dgates_TK);
  }
  {
    Arena::Scope scope(c.workspace);
    const Tensor dx_RD = c.temporary(c.dtype, {R, D});
    c.ops.grouped_matmul_input(deferred.dh_R2F, c.weight(gate_up_), saved.route.offsets_L1, dx_RD);
    c.ops.combine_rows(dx_RD, saved.route, post_norm_ ? dy_TD : Tensor{}, dx_TD);
  }
  if (shared_) shared_->backward_input(c, deferred.doutput_TD, dx_TD, dx_TD, saved.shared, deferred.shared);
  router_.backward_input(c, dgates_TK, tokens_per_unit, balance_UE, scales, dx_TD, saved.router, deferred.router);
  if (!post_norm_) norm_.backward(c, saved.x_TD, saved.norm_statistics, dx_TD, dy_TD, dx_TD);
}

void MoeLayer::backward_weight(Context& c, const MoeSaved& saved, const MoeDeferred& deferred) const {
  c.ops.grouped_matmul_weight(deferred.doutput_RD, deferred.a_RF, saved.route.offsets_L1, c.gradient(down_), c.write);
  {
    Arena::Scope scope(c.workspace);
    const Tensor x_RD = c.temporary(c.dtype, deferred.doutput_RD.shape);
    c.ops.gather_rows(saved.input_TD, saved.route, x_RD);
    c.ops.grouped_matmul_weight(deferred.dh_R2F, x_RD, saved.route.offsets_L1, c.gradient(gate_up_), c.write);
  }
  if (shared_) shared_->backward_weight(c, deferred.doutput_TD, saved.input_TD, deferred.shared);
  router_.backward_weight(c, saved.input_TD, deferred.router);
}

}  // namespace optimus
