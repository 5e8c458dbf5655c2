#include "optimus/model/moe.h"

#include <cmath>

#include "optimus/model/linear.h"

namespace optimus {
namespace {

std::optional<GatedMlp> shared_experts(const ModelConfig& model, ParameterTable& table, const std::string& name,
                                       int64_t layer) {
  if (model.shared_mlp_width() == 0) return std::nullopt;
  return GatedMlp(model, table, name + ".shared", model.shared_mlp_width(), layer);
}

ParameterId add_experts(const ModelConfig& model, const Placement& placement, ParameterTable& table, std::string name,
                        int64_t rows, int64_t columns, int64_t layer) {
  Parameter row;
  row.name = std::move(name);
  row.global = {model.moe->experts, rows, columns};
  row.boxes = {{{placement.first_expert, 0, 0}, {placement.experts, rows, columns}}};
  row.cls = ParameterClass::expert;
  row.init_std = model.init_std;
  row.layer = layer;
  return table.add(std::move(row));
}

// The number of rows of the wave, on the device.
Tensor row_count(const RouteIndex& route) { return route.offsets_L1.slice(route.offsets_L1.elements() - 1, 1); }

}  // namespace

MoeLayer::MoeLayer(const ModelConfig& model, const Placement& placement, double row_capacity, ParameterTable& table,
                   int64_t layer)
    : moe_(*model.moe),
      hidden_(model.hidden),
      first_expert_(placement.first_expert),
      experts_(placement.experts),
      moe_rows_(row_capacity),
      post_norm_(model.norm_position == "post"),
      norm_(model, table, fmt::format("layers.{}.moe.norm", layer), layer),
      router_(model, table, fmt::format("layers.{}.moe", layer), layer),
      gate_up_(add_experts(model, placement, table, fmt::format("layers.{}.moe.gate_up.weight", layer), 2 * moe_.width,
                           model.hidden, layer)),
      down_(add_experts(model, placement, table, fmt::format("layers.{}.moe.down.weight", layer), model.hidden,
                        moe_.width, layer)),
      shared_(shared_experts(model, table, fmt::format("layers.{}.moe", layer), layer)) {}

// ---- waves ----

// Balanced experts give every rank as many rows as its own tokens have slots.
int64_t MoeLayer::row_capacity(const Context& c, int64_t tokens) const {
  const int64_t most = c.dispatcher.capacity(tokens) * std::min(moe_.top_k, experts_);
  if (c.dispatcher.local()) return most;
  return std::min(most, int64_t(std::ceil(moe_rows_ * double(tokens * moe_.top_k))));
}

int64_t MoeLayer::row_waves(const Context& c, int64_t own_tokens, int64_t dispatched) const {
  const int64_t most = dispatched * std::min(moe_.top_k, experts_), capacity = row_capacity(c, own_tokens);
  return std::max<int64_t>(1, (most + capacity - 1) / capacity);
}

bool MoeLayer::one_wave(const Context& c, int64_t tokens) const {
  return c.dispatcher.one_wave(tokens) && row_waves(c, tokens, c.dispatcher.capacity(tokens)) == 1;
}

ExpertTokens MoeLayer::dispatch(Context& c, const MoeSaved& saved, int64_t wave, Arena& arena) const {
  const auto moved = [&](Tensor x_TC) { return c.dispatcher.dispatch(c, saved.dispatch, wave, x_TC, arena); };
  return {moved(saved.input_TD), moved(saved.router.gates_TK), moved(saved.router.ids_TK)};
}

RouteIndex MoeLayer::route(Context& c, Tensor ids_NK, int64_t own_tokens, int64_t row_wave, Arena& arena) const {
  const int64_t R = row_capacity(c, own_tokens);
  const auto indices = [&](int64_t count) { return arena.allocate(DType::i32, {count}, "router"); };
  RouteIndex index{indices(experts_ + 1), indices(R), indices(R), indices(ids_NK.rows() + 1), indices(R)};
  index.balanced_rows = row_wave == 0 ? double(own_tokens * moe_.top_k) : 0.0;
  c.ops.route(ids_NK, first_expert_, row_wave * R, index);
  return index;
}

// ---- the rows of one wave ----

void MoeLayer::rows_forward(Context& c, const ExpertTokens& tokens, const RouteIndex& route, Tensor h_R2F,
                            Tensor addend_ND, Tensor y_ND) const {
  const int64_t R = h_R2F.rows();
  {
    Arena::Scope scope(c.workspace);
    const Tensor x_RD = c.temporary(c.dtype, {R, hidden_});
    c.ops.gather_rows(tokens.x_ND, route, x_RD);
    c.ops.grouped_matmul(x_RD, c.weight(gate_up_), route, h_R2F);
  }
  if (!y_ND) return;
  Arena::Scope scope(c.workspace);
  const Tensor a_RF = c.temporary(c.dtype, {R, moe_.width});
  const Tensor y_RD = c.temporary(c.dtype, {R, hidden_});
  c.ops.swiglu(h_R2F, tokens.gates_NK, route.slot_R, row_count(route), a_RF);
  c.ops.grouped_matmul(a_RF, c.weight(down_), route, y_RD);
  c.ops.combine_rows(y_RD, route, addend_ND, y_ND);
}

void MoeLayer::rows_backward(Context& c, const ExpertTokens& tokens, const RouteIndex& route, Tensor h_R2F,
                             Tensor dy_ND, Tensor addend_ND, Tensor dx_ND, Tensor dgates_NK,
                             MoeDeferred& deferred) const {
  const int64_t R = h_R2F.rows();
  c.ops.gather_rows(dy_ND, route, deferred.doutput_RD);
  {
    Arena::Scope scope(c.workspace);
    const Tensor da_RF = c.temporary(c.dtype, {R, moe_.width});
    c.ops.grouped_matmul_input(deferred.doutput_RD, c.weight(down_), route, da_RF);
    c.ops.swiglu_backward(h_R2F, da_RF, tokens.gates_NK, route.slot_R, row_count(route), deferred.dh_R2F, deferred.a_RF,
                          dgates_NK);
  }
  Arena::Scope scope(c.workspace);
  const Tensor dx_RD = c.temporary(c.dtype, {R, hidden_});
  c.ops.grouped_matmul_input(deferred.dh_R2F, c.weight(gate_up_), route, dx_RD);
  c.ops.combine_rows(dx_RD, route, addend_ND, dx_ND);
}

void MoeLayer::rows_backward_weight(Context& c, const ExpertTokens& tokens, const RouteIndex& route,
                                    const MoeDeferred& deferred, Write write) const {
  c.ops.grouped_matmul_weight(deferred.doutput_RD, deferred.a_RF, route, c.gradient(down_), write);
  Arena::Scope scope(c.workspace);
  const Tensor x_RD = c.temporary(c.dtype, deferred.doutput_RD.shape);
  c.ops.gather_rows(tokens.x_ND, route, x_RD);
  c.ops.grouped_matmul_weight(deferred.dh_R2F, x_RD, route, c.gradient(gate_up_), write);
}

// ---- the layer ----

void MoeLayer::experts_forward(Context& c, Tensor addend_TD, Tensor y_TD, MoeSaved& saved) const {
  const int64_t T = y_TD.rows();
  c.dispatcher.begin(c, saved.router.ids_TK, saved.dispatch);
  for (int64_t wave = 0; wave < saved.dispatch.waves; ++wave) {
    const bool keep = wave == 0;
    Arena::Scope wave_scope(c.workspace);
    const ExpertTokens tokens = dispatch(c, saved, wave, keep ? c.saved : c.workspace);
    const int64_t N = tokens.x_ND.rows();
    const Tensor part_ND = c.dispatcher.local() ? y_TD : c.temporary(c.dtype, {N, hidden_});
    Tensor addend = c.dispatcher.local() ? addend_TD : Tensor{};
    for (int64_t row_wave = 0; row_wave < row_waves(c, T, N); ++row_wave) {
      Arena::Scope row_scope(c.workspace);
      Arena& arena = keep && row_wave == 0 ? c.saved : c.workspace;
      const RouteIndex rows = route(c, tokens.ids_NK, T, row_wave, arena);
      const Tensor h_R2F = arena.allocate(c.dtype, {row_capacity(c, T), 2 * moe_.width}, "experts");
      rows_forward(c, tokens, rows, h_R2F, addend, part_ND);
      addend = part_ND;
      if (&arena == &c.saved) saved.tokens = tokens, saved.route = rows, saved.h_R2F = h_R2F;
    }
    if (!c.dispatcher.local())
      c.dispatcher.combine(c, saved.dispatch, wave, part_ND, wave == 0 ? addend_TD : y_TD, y_TD);
  }
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
  experts_forward(c, addend, output, saved);
  if (shared_) shared_->forward(c, saved.input_TD, output, output, saved.shared);
  if (post_norm_) norm_.forward(c, output, x_TD, y_TD, saved.norm_statistics);
}

void MoeLayer::backward_input(Context& c, Tensor dy_TD, Tensor dx_TD, int64_t tokens_per_unit, Tensor balance_UE,
                              const LossScales& scales, const MoeSaved& saved, MoeDeferred& deferred) const {
  const int64_t T = dy_TD.rows(), K = moe_.top_k, R = row_capacity(c, T);
  const bool local = c.dispatcher.local();
  deferred.doutput_TD = dy_TD;
  if (post_norm_) {
    deferred.doutput_TD = c.defer(c.dtype, dy_TD.shape);
    norm_.backward(c, saved.x_TD, saved.norm_statistics, dy_TD, {}, deferred.doutput_TD);
  }
  const auto rows_deferred = [&](MoeDeferred& to, Arena& arena) {
    to.doutput_RD = arena.allocate(c.dtype, {R, hidden_}, "deferred");
    to.dh_R2F = arena.allocate(c.dtype, {R, 2 * moe_.width}, "deferred");
    to.a_RF = arena.allocate(c.dtype, {R, moe_.width}, "deferred");
  };
  rows_deferred(deferred, c.deferred);
  // The weight gradients of further waves are not deferred: they may come before those of micro-batches before, so where
  // there may be any, the gradient begins at zero.
  if (!one_wave(c, T) && c.write == Write::overwrite)
    for (ParameterId id : {gate_up_, down_}) c.ops.fill(c.gradient(id), 0.0);

  // Where post-norm adds x outside of this branch, its gradient is dy.
  const Tensor addend_TD = post_norm_ ? dy_TD : Tensor{};
  const Tensor dgates_TK = c.temporary(DType::f32, {T, K});
  for (int64_t wave = 0; wave < saved.dispatch.waves; ++wave) {
    const bool kept = wave == 0;
    Arena::Scope wave_scope(c.workspace);
    const ExpertTokens tokens = kept ? saved.tokens : dispatch(c, saved, wave, c.workspace);
    const int64_t N = tokens.x_ND.rows();
    const Tensor dy_ND = c.dispatcher.dispatch(c, saved.dispatch, wave, deferred.doutput_TD, c.workspace);
    const Tensor dx_ND = local ? dx_TD : c.temporary(c.dtype, {N, hidden_});
    const Tensor dgates_NK = local ? dgates_TK : c.temporary(DType::f32, {N, K});
    Tensor addend_ND = local ? addend_TD : Tensor{};
    if (!local) c.ops.fill(dgates_NK, 0.0);
    for (int64_t row_wave = 0; row_wave < row_waves(c, T, N); ++row_wave) {
      if (kept && row_wave == 0) {
        rows_backward(c, tokens, saved.route, saved.h_R2F, dy_ND, addend_ND, dx_ND, dgates_NK, deferred);
      } else {
        Arena::Scope row_scope(c.workspace);
        const RouteIndex rows = route(c, tokens.ids_NK, T, row_wave, c.workspace);
        const Tensor h_R2F = c.temporary(c.dtype, {R, 2 * moe_.width});
        MoeDeferred further;
        rows_deferred(further, c.workspace);
        rows_forward(c, tokens, rows, h_R2F, {}, {});
        rows_backward(c, tokens, rows, h_R2F, dy_ND, addend_ND, dx_ND, dgates_NK, further);
        rows_backward_weight(c, tokens, rows, further, Write::accumulate);
      }
      addend_ND = dx_ND;
    }
    if (local) continue;
    c.dispatcher.combine(c, saved.dispatch, wave, dx_ND, kept ? addend_TD : dx_TD, dx_TD);
    c.dispatcher.combine(c, saved.dispatch, wave, dgates_NK, kept ? Tensor{} : dgates_TK, dgates_TK);
  }
  if (shared_) shared_->backward_input(c, deferred.doutput_TD, dx_TD, dx_TD, saved.shared, deferred.shared);
  router_.backward_input(c, dgates_TK, tokens_per_unit, balance_UE, scales, dx_TD, saved.router, deferred.router);
  if (!post_norm_) norm_.backward(c, saved.x_TD, saved.norm_statistics, dx_TD, dy_TD, dx_TD);
}

void MoeLayer::backward_weight(Context& c, const MoeSaved& saved, const MoeDeferred& deferred) const {
  const bool begun = !one_wave(c, saved.input_TD.rows());
  rows_backward_weight(c, saved.tokens, saved.route, deferred, begun ? Write::accumulate : c.write);
  if (shared_) shared_->backward_weight(c, deferred.doutput_TD, saved.input_TD, deferred.shared);
  router_.backward_weight(c, saved.input_TD, deferred.router);
}

}  // namespace optimus
