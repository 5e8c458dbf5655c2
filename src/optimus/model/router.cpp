#include "optimus/model/router.h"

#include "optimus/model/linear.h"

namespace optimus {

Balance::Balance(const MoeConfig& moe, int64_t moe_layers)
    : moe_(moe), layers_(moe_layers), per_sequence_(moe.balance_unit == "sequence") {}

void Balance::begin(Context& c, const MicroBatch& batch, BalanceSaved& saved) const {
  const Shape shape{layers_, units(batch), moe_.experts};
  saved.counts_NUE = c.save(DType::f32, shape, "router");
  saved.prob_sums_NUE = c.save(DType::f32, shape, "router");
  saved.gradient_NUE = c.save(DType::f32, shape, "router");
}

void Balance::finish(Context& c, const MicroBatch& batch, const LossScales& scales, const LossSums& sums,
                     Tensor previous_counts_NE, Tensor step_counts_NE, BalanceSaved& saved) const {
  const bool whole_model = moe_.balance_scope == "model";
  const bool fixed_load = moe_.balance_unit == "global";
  const int64_t U = units(batch), E = moe_.experts;
  for (int64_t layer = 0; step_counts_NE && layer < layers_; ++layer)
    for (int64_t unit = 0; unit < U; ++unit)
      c.ops.add(step_counts_NE[layer], saved.counts_NUE[layer][unit], step_counts_NE[layer]);
  if (moe_.balance != "loss") {
    c.ops.fill(saved.gradient_NUE, 0.0);
    return;
  }

  // One value per layer, or one over the sum of all layers.
  Arena::Scope scope(c.workspace);
  Tensor counts = saved.counts_NUE, prob_sums = saved.prob_sums_NUE, fixed = previous_counts_NE;
  if (whole_model) {
    counts = c.temporary(DType::f32, {1, U, E});
    prob_sums = c.temporary(DType::f32, {1, U, E});
    c.ops.copy(saved.counts_NUE[0], counts[0]);
    c.ops.copy(saved.prob_sums_NUE[0], prob_sums[0]);
    if (fixed_load) {
      fixed = c.temporary(DType::f32, {1, E});
      c.ops.copy(previous_counts_NE[0], fixed[0]);
    }
    for (int64_t layer = 1; layer < layers_; ++layer) {
      c.ops.add(counts[0], saved.counts_NUE[layer], counts[0]);
      c.ops.add(prob_sums[0], saved.prob_sums_NUE[layer], prob_sums[0]);
      if (fixed_load) c.ops.add(fixed[0], previous_counts_NE[layer], fixed[0]);
    }
  }
  const int64_t values = whole_model ? 1 : layers_;
  const double layers_together = whole_model ? double(layers_) : 1.0;
  const double tokens = double(tokens_per_unit(batch)) * layers_together;
  double scale = 1.0 / scales.units;
  if (moe_.balance_divide_by_k) scale /= double(moe_.top_k);
  // The loss is linear in f, so raw counts serve as f when the scale takes their tokens.
  if (fixed_load) scale /= scales.tokens * layers_together;
  for (int64_t value = 0; value < values; ++value)
    c.ops.balance_loss(counts[value], prob_sums[value], fixed_load ? fixed[value] : Tensor{}, tokens, scale,
                       scale * moe_.balance_coef, sums.balance, saved.gradient_NUE[value]);
  for (int64_t layer = values; layer < layers_; ++layer) c.ops.copy(saved.gradient_NUE[0], saved.gradient_NUE[layer]);
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
  deferred.dlogits_TE = c.temporary(c.dtype, saved.logits_TE.shape);
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
