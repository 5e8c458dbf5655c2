#include "optimus/model/router.h"

#include "optimus/model/linear.h"

namespace optimus {

Balance::Balance(const MoeConfig& moe, int64_t first_layer, int64_t layers, int64_t all_layers)
    : moe_(moe),
      first_layer_(first_layer),
      layers_(layers),
      all_layers_(all_layers),
      per_sequence_(moe.balance_unit == "sequence") {}

void Balance::begin(Context& c, const MicroBatch& batch, BalanceSaved& saved) const {
  const int64_t U = units(batch), E = moe_.experts;
  saved.counts_NUE = c.save(DType::f32, {layers_, U, E}, "router");
  saved.prob_sums_NUE = c.save(DType::f32, {layers_, U, E}, "router");
  if (!whole_model()) saved.gradient_AUE = c.save(DType::f32, {layers_, U, E}, "router");
}

// The loss is linear in f, so raw counts serve as f when the scale takes their tokens.
double Balance::scale(const LossScales& scales, double layers_together) const {
  double scale = 1.0 / scales.units;
  if (moe_.balance_divide_by_k) scale /= double(moe_.top_k);
  if (moe_.balance_unit == "global") scale /= scales.tokens * layers_together;
  return scale;
}

void Balance::finish(Context& c, const MicroBatch& batch, const LossScales& scales, const LossSums& sums,
                     Tensor previous_counts, Tensor step_counts, BalanceSaved& saved) const {
  const int64_t U = units(batch), E = moe_.experts;
  if (step_counts && layers_ > 0) {
    const Tensor counts_NE = step_counts.slice(first_layer_, layers_);
    const Tensor units_NC = saved.counts_NUE.reshape({layers_, U * E});
    for (int64_t unit = 0; unit < U; ++unit) c.ops.add(counts_NE, units_NC.column_slice(unit * E, E), counts_NE);
  }
  if (moe_.balance != "loss") c.ops.fill(saved.gradient_AUE, 0.0);
  if (moe_.balance != "loss" || whole_model()) return;
  const double value = scale(scales, 1.0), tokens = double(tokens_per_unit(batch));
  const auto add_loss = [&](Tensor counts, Tensor prob_sums, Tensor fixed_f, Tensor gradient) {
    c.ops.balance_loss(counts, prob_sums, fixed_f, tokens, value, value * moe_.balance_coef, sums.balance, gradient);
  };
  if (moe_.balance_unit == "global") {
    for (int64_t n = 0; n < layers_; ++n)
      add_loss(saved.counts_NUE[n], saved.prob_sums_NUE[n], previous_counts[first_layer_ + n], saved.gradient_AUE[n]);
    return;
  }
  // The layers' units are alike.
  const auto all_units = [&](Tensor x_NUE) { return x_NUE.reshape({layers_ * U, E}); };
  if (layers_ > 0)
    add_loss(all_units(saved.counts_NUE), all_units(saved.prob_sums_NUE), {}, all_units(saved.gradient_AUE));
}

void Balance::pass_on(Context& c, const BalanceSaved& saved, Tensor from_2UE, Tensor to_2UE) const {
  if (from_2UE) c.ops.copy(from_2UE, to_2UE);
  else c.ops.fill(to_2UE, 0.0);
  for (int64_t layer = 0; layer < layers_; ++layer) {
    c.ops.add(to_2UE[0], saved.counts_NUE[layer], to_2UE[0]);
    c.ops.add(to_2UE[1], saved.prob_sums_NUE[layer], to_2UE[1]);
  }
}

void Balance::finish_model(Context& c, const MicroBatch& batch, const LossScales& scales, const LossSums& sums,
                           Tensor previous_counts, Tensor totals_2UE, Tensor gradient_UE) const {
  Arena::Scope scope(c.workspace);
  Tensor fixed_E;
  if (moe_.balance_unit == "global") {
    fixed_E = c.temporary(DType::f32, {moe_.experts});
    c.ops.fill(fixed_E, 0.0);
    for (int64_t layer = 0; layer < all_layers_; ++layer) c.ops.add(fixed_E, previous_counts[layer], fixed_E);
  }
  const double value = scale(scales, double(all_layers_));
  c.ops.balance_loss(totals_2UE[0], totals_2UE[1], fixed_E, double(tokens_per_unit(batch) * all_layers_), value,
                     value * moe_.balance_coef, sums.balance, gradient_UE);
}

Router::Router(const ModelConfig& model, ParameterTable& table, const std::string& name, int64_t layer)
    : moe_(*model.moe),
      weight_(table.add_normal(name + ".router.weight", {moe_.experts, model.hidden}, model.init_std, layer)) {}

RouterShape Router::shape(int64_t tokens_per_unit) const {
  return {moe_.top_k,           moe_.score == "softmax" ? ScoreKind::softmax : ScoreKind::sigmoid,
          moe_.normalize_top_k, float(moe_.score_scale),
          moe_.groups,          moe_.top_groups,
          tokens_per_unit};
}

void Router::forward(Context& c, Tensor x_TD, int64_t tokens_per_unit, Tensor counts_UE, Tensor prob_sums_UE,
                     const LossSums& sums, RouterSaved& saved) const {
  const int64_t T = x_TD.rows();
  saved.logits_TE = c.save(DType::f32, {T, moe_.experts}, "router");
  saved.probs_TE = c.save(DType::f32, {T, moe_.experts}, "router");
  saved.gates_TK = c.save(DType::f32, {T, moe_.top_k}, "router");
  saved.ids_TK = c.save(DType::i32, {T, moe_.top_k}, "router");
  saved.lse_T = c.save(DType::f32, {T}, "router");
  linear(c, x_TD, weight_, {}, saved.logits_TE);
  c.ops.router(shape(tokens_per_unit), saved.logits_TE, {}, saved.probs_TE, saved.gates_TK, saved.ids_TK, saved.lse_T);
  c.ops.router_statistics(shape(tokens_per_unit), saved.probs_TE, saved.ids_TK, saved.lse_T, counts_UE, prob_sums_UE,
                          sums.z);
}

void Router::backward_input(Context& c, Tensor dgates_TK, int64_t tokens_per_unit, Tensor balance_UE,
                            const LossScales& scales, Tensor dx_TD, const RouterSaved& saved,
                            RouterDeferred& deferred) const {
  deferred.dlogits_TE = c.defer(c.dtype, saved.logits_TE.shape);
  Arena::Scope scope(c.workspace);
  const Tensor dlogits = c.dtype == DType::f32 ? deferred.dlogits_TE : c.temporary(DType::f32, saved.logits_TE.shape);
  c.ops.router_backward(shape(tokens_per_unit), saved.logits_TE, saved.probs_TE, saved.gates_TK, saved.ids_TK,
                        saved.lse_T, dgates_TK, balance_UE, float(moe_.z_loss_coef / scales.tokens), dlogits);
  if (c.dtype != DType::f32) c.ops.copy(dlogits, deferred.dlogits_TE);
  linear_backward_input(c, deferred.dlogits_TE, weight_, dx_TD, dx_TD);
}

void Router::backward_weight(Context& c, Tensor x_TD, const RouterDeferred& deferred) const {
  linear_backward_weight(c, deferred.dlogits_TE, x_TD, weight_);
}

}  // namespace optimus
