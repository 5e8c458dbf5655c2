// Causal self-attention with rotary positions, grouped key/value heads and optional QK-norm:
//
//   pre-norm:   y = x + o_proj(attention(rope(qk_norm(q, k)), v)),        q, k, v = qkv_proj(norm(x))
//   post-norm:  y = x + norm(o_proj(attention(...))),                     q, k, v = qkv_proj(x)
//
// T tokens, D hidden, H query heads, G key/value heads, W head_dim, Q = (H + 2G) * W the fused projection's width.
#pragma once

#include <optional>

#include "optimus/model/norm.h"

namespace optimus {

/// Keys and values of one sequence's earlier positions, in one layer.
struct KvCache {
  Tensor k, v;         ///< [capacity, G*W]
  int64_t length = 0;  ///< positions filled before this call
};

struct AttentionSaved {          // forward -> backward
  Tensor x_TD, norm_statistics;  // what was normalised: x before the projections, or the output projection's result
  Tensor input_TD;               // input of the fused projection
  Tensor qkv_TQ;                 // projections; q and k rotated in place where there is no QK-norm
  Tensor qk_TP, q_statistics, k_statistics;  // with QK-norm: normalised, rotated q and k; P = (H + G) * W
  Tensor o_TP, lse_BHS;
};
struct AttentionDeferred {  // backward_input -> backward_weight
  Tensor dqkv_TQ;
  Tensor doutput_TD;  // gradient at the output projection's result
};

class Attention {
 public:
  Attention(const ModelConfig& model, ParameterTable& table, int64_t layer);

  void forward(Context& c, const MicroBatch& batch, Tensor x_TD, Tensor y_TD, AttentionSaved& saved,
               KvCache* cache = nullptr) const;
  void backward_input(Context& c, const MicroBatch& batch, Tensor dy_TD, Tensor dx_TD, const AttentionSaved& saved,
                      AttentionDeferred& deferred) const;
  void backward_weight(Context& c, const AttentionSaved& saved, const AttentionDeferred& deferred) const;

 private:
  AttentionShape shape(int64_t sequences, int64_t queries, int64_t keys) const;

  int64_t heads_, kv_heads_, head_dim_;
  float rope_theta_;
  bool post_norm_;
  Norm norm_;
  ParameterId qkv_;
  std::optional<Norm> q_norm_, k_norm_;
  ParameterId output_;
};

}  // namespace optimus
