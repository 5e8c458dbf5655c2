#include "optimus/model/attention.h"

#include <cmath>

#include "optimus/model/linear.h"

namespace optimus {
namespace {

std::optional<Norm> qk_norm(const ModelConfig& model, ParameterTable& table, const std::string& name, int64_t heads,
                            int64_t layer) {
  if (model.qk_norm == "none") return std::nullopt;
  const bool per_head = model.qk_norm == "head";
  return Norm(model.norm_eps, per_head ? heads : 1, per_head ? model.head_dim : heads * model.head_dim, table, name,
              layer);
}

}  // namespace

Attention::Attention(const ModelConfig& model, ParameterTable& table, int64_t layer)
    : heads_(model.heads),
      kv_heads_(model.kv_heads),
      head_dim_(model.head_dim),
      rope_theta_(float(model.rope_theta)),
      post_norm_(model.norm_position == "post"),
      norm_(model, table, fmt::format("layers.{}.attention.norm", layer), layer),
      qkv_(table.add_normal(fmt::format("layers.{}.attention.qkv.weight", layer),
                            {model.query_width() + 2 * model.kv_width(), model.hidden}, model.init_std, layer)),
      q_norm_(qk_norm(model, table, fmt::format("layers.{}.attention.q_norm", layer), model.heads, layer)),
      k_norm_(qk_norm(model, table, fmt::format("layers.{}.attention.k_norm", layer), model.kv_heads, layer)),
      output_(table.add_normal(fmt::format("layers.{}.attention.output.weight", layer),
                               {model.hidden, model.query_width()}, model.init_std, layer)) {}

AttentionShape Attention::shape(int64_t sequences, int64_t queries, int64_t keys) const {
  return {sequences, queries, keys, heads_, kv_heads_, head_dim_, true, float(1.0 / std::sqrt(double(head_dim_)))};
}

void Attention::forward(Context& c, const MicroBatch& batch, Tensor x_TD, Tensor y_TD, AttentionSaved& saved,
                        KvCache* cache) const {
  const int64_t T = batch.tokens(), q_width = heads_ * head_dim_, kv_width = kv_heads_ * head_dim_;

  saved.input_TD = x_TD;
  if (!post_norm_) {
    saved.x_TD = x_TD;
    saved.norm_statistics = c.save(DType::f32, norm_.statistics_shape(T), "norm");
    saved.input_TD = c.save(c.dtype, x_TD.shape, "norm");
    norm_.forward(c, x_TD, {}, saved.input_TD, saved.norm_statistics);
  }
  saved.qkv_TQ = c.save(c.dtype, {T, q_width + 2 * kv_width}, "attention");
  linear(c, saved.input_TD, qkv_, {}, saved.qkv_TQ);
  Tensor qk = saved.qkv_TQ.column_slice(0, q_width + kv_width);
  Tensor v = saved.qkv_TQ.column_slice(q_width + kv_width, kv_width);
  if (q_norm_) {
    saved.qk_TP = c.save(c.dtype, {T, q_width + kv_width}, "attention");
    saved.q_statistics = c.save(DType::f32, q_norm_->statistics_shape(T), "attention");
    saved.k_statistics = c.save(DType::f32, k_norm_->statistics_shape(T), "attention");
    q_norm_->forward(c, qk.column_slice(0, q_width), {}, saved.qk_TP.column_slice(0, q_width), saved.q_statistics);
    k_norm_->forward(c, qk.column_slice(q_width, kv_width), {}, saved.qk_TP.column_slice(q_width, kv_width),
                     saved.k_statistics);
    qk = saved.qk_TP;
  }
  c.ops.rope(qk, batch.positions_T, heads_ + kv_heads_, rope_theta_, RopeDirection::forward, qk);
  const Tensor q = qk.column_slice(0, q_width);
  Tensor k = qk.column_slice(q_width, kv_width);

  AttentionShape attention = shape(batch.sequences, batch.sequence_length, batch.sequence_length);
  if (cache) {
    c.ops.copy(k, cache->k.slice(cache->length, T));
    c.ops.copy(v, cache->v.slice(cache->length, T));
    attention.keys = cache->length + T;
    k = cache->k.slice(0, attention.keys);
    v = cache->v.slice(0, attention.keys);
  }
  saved.o_TP = c.save(c.dtype, {T, q_width}, "attention");
  saved.lse_BHS = c.save(DType::f32, {batch.sequences, heads_, batch.sequence_length}, "attention");
  c.ops.attention(attention, q, k, v, saved.o_TP, saved.lse_BHS);

  if (!post_norm_) {
    linear(c, saved.o_TP, output_, x_TD, y_TD);
    return;
  }
  saved.x_TD = c.save(c.dtype, x_TD.shape, "norm");
  saved.norm_statistics = c.save(DType::f32, norm_.statistics_shape(T), "norm");
  linear(c, saved.o_TP, output_, {}, saved.x_TD);
  norm_.forward(c, saved.x_TD, x_TD, y_TD, saved.norm_statistics);
}

void Attention::backward_input(Context& c, const MicroBatch& batch, Tensor dy_TD, Tensor dx_TD,
                               const AttentionSaved& saved, AttentionDeferred& deferred) const {
  const int64_t q_width = heads_ * head_dim_, kv_width = kv_heads_ * head_dim_;

  deferred.doutput_TD = dy_TD;
  if (post_norm_) {
    deferred.doutput_TD = c.defer(c.dtype, dy_TD.shape);
    norm_.backward(c, saved.x_TD, saved.norm_statistics, dy_TD, {}, deferred.doutput_TD);
  }
  deferred.dqkv_TQ = c.defer(c.dtype, saved.qkv_TQ.shape);
  const Tensor dq = deferred.dqkv_TQ.column_slice(0, q_width);
  const Tensor dk = deferred.dqkv_TQ.column_slice(q_width, kv_width);
  const Tensor dv = deferred.dqkv_TQ.column_slice(q_width + kv_width, kv_width);
  {
    Arena::Scope scope(c.workspace);
    const Tensor do_TP = c.temporary(c.dtype, saved.o_TP.shape);
    const AttentionShape attention = shape(batch.sequences, batch.sequence_length, batch.sequence_length);
    const int64_t scratch_bytes = c.ops.attention_scratch_bytes(attention, c.dtype);
    const Tensor scratch = scratch_bytes > 0 ? c.temporary(DType::f32, {scratch_bytes / 4}) : Tensor{};
    linear_backward_input(c, deferred.doutput_TD, output_, {}, do_TP);
    const Tensor qk = q_norm_ ? saved.qk_TP : saved.qkv_TQ;
    c.ops.attention_backward(attention, qk.column_slice(0, q_width), qk.column_slice(q_width, kv_width),
                             saved.qkv_TQ.column_slice(q_width + kv_width, kv_width), saved.o_TP, saved.lse_BHS, do_TP,
                             dq, dk, dv, scratch);
  }
  const Tensor dqk = deferred.dqkv_TQ.column_slice(0, q_width + kv_width);
  c.ops.rope(dqk, batch.positions_T, heads_ + kv_heads_, rope_theta_, RopeDirection::backward, dqk);
  if (q_norm_) {
    q_norm_->backward(c, saved.qkv_TQ.column_slice(0, q_width), saved.q_statistics, dq, {}, dq);
    k_norm_->backward(c, saved.qkv_TQ.column_slice(q_width, kv_width), saved.k_statistics, dk, {}, dk);
  }
  if (post_norm_) {
    linear_backward_input(c, deferred.dqkv_TQ, qkv_, dy_TD, dx_TD);
    return;
  }
  linear_backward_input(c, deferred.dqkv_TQ, qkv_, {}, dx_TD);
  norm_.backward(c, saved.x_TD, saved.norm_statistics, dx_TD, dy_TD, dx_TD);
}

void Attention::backward_weight(Context& c, const AttentionSaved& saved, const AttentionDeferred& deferred) const {
  linear_backward_weight(c, deferred.doutput_TD, saved.o_TP, output_);
  linear_backward_weight(c, deferred.dqkv_TQ, saved.input_TD, qkv_);
}

}  // namespace optimus
