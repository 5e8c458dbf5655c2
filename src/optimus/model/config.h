// The [model] section: everything that defines the mathematics of the model, and nothing about how it is run.
#pragma once

#include <cstdint>
#include <optional>
#include <string>

namespace optimus {

struct MoeConfig {
  int64_t experts = 0;
  int64_t top_k = 0;
  int64_t width = 0;
  int64_t shared_experts = 0;
  int64_t shared_width = 0;        ///< width of one shared expert; 0: as `width`
  int64_t first_dense_layers = 0;  ///< that many leading layers have a dense MLP of mlp_width
  std::string score = "softmax";
  bool normalize_top_k = false;
  double score_scale = 1.0;
  int64_t groups = 1;
  int64_t top_groups = 1;
  std::string balance = "loss";
  double balance_coef = 0.01;
  std::string balance_scope = "layer";
  std::string balance_unit = "micro_batch";
  bool balance_divide_by_k = false;
  double bias_update = 0.0;
  double z_loss_coef = 0.0;

  bool operator==(const MoeConfig&) const = default;

  template <typename V>
  void fields(V& v) {
    v("experts", experts);
    v("top_k", top_k);
    v("width", width);
    v("shared_experts", shared_experts);
    v("shared_width", shared_width);
    v("first_dense_layers", first_dense_layers);
    v("score", score, {"softmax", "sigmoid"});
    v("normalize_top_k", normalize_top_k);
    v("score_scale", score_scale);
    v("groups", groups);
    v("top_groups", top_groups);
    v("balance", balance, {"loss", "bias", "none"});
    v("balance_coef", balance_coef);
    v("balance_scope", balance_scope, {"layer", "model"});
    v("balance_unit", balance_unit, {"micro_batch", "sequence", "global"});
    v("balance_divide_by_k", balance_divide_by_k);
    v("bias_update", bias_update);
    v("z_loss_coef", z_loss_coef);
  }
};

struct ModelConfig {
  int64_t layers = 0;
  int64_t hidden = 0;
  int64_t heads = 0;
  int64_t kv_heads = 0;  ///< 0 before resolve(): as heads
  int64_t head_dim = 0;  ///< 0 before resolve(): hidden / heads
  int64_t vocab = 0;     ///< 0 before the tokenizer is known
  int64_t sequence = 1024;
  std::string norm = "rms";
  std::string norm_position = "pre";
  double norm_eps = 1e-5;
  double rope_theta = 1e4;
  std::string qk_norm = "none";
  int64_t mlp_width = 0;  ///< 0 before resolve(): 4 * hidden
  bool tie_embeddings = false;
  double init_std = 0.02;
  int64_t padding_token = -1;
  std::string objective = "causal";
  std::optional<MoeConfig> moe;

  bool operator==(const ModelConfig&) const = default;

  template <typename V>
  void fields(V& v) {
    v("layers", layers);
    v("hidden", hidden);
    v("heads", heads);
    v("kv_heads", kv_heads);
    v("head_dim", head_dim);
    v("vocab", vocab);
    v("sequence", sequence);
    v("norm", norm, {"rms", "layer", "layer_nonparametric"});
    v("norm_position", norm_position, {"pre", "post"});
    v("norm_eps", norm_eps);
    v("rope_theta", rope_theta);
    v("qk_norm", qk_norm, {"none", "full", "head"});
    v("mlp_width", mlp_width);
    v("tie_embeddings", tie_embeddings);
    v("init_std", init_std);
    v("padding_token", padding_token);
    v("objective", objective, {"causal", "diffusion"});
    v.table("moe", moe);
  }

  /// Fills what depends on other keys and checks every constraint that the model alone decides; `where` (a file name)
  /// starts the message. Throws Error(kUsage).
  void resolve(const std::string& where);

  int64_t query_width() const { return heads * head_dim; }
  int64_t kv_width() const { return kv_heads * head_dim; }
  bool moe_layer(int64_t layer) const { return moe && layer >= moe->first_dense_layers; }
  int64_t moe_layers() const { return moe ? layers - moe->first_dense_layers : 0; }
  int64_t shared_mlp_width() const {
    return moe ? moe->shared_experts * (moe->shared_width ? moe->shared_width : moe->width) : 0;
  }
};

/// FLOPs a token costs in training (forward and backward), by the model's mathematics: 6 x active matmul parameters
/// (without the input embedding) + 6 x layers x S x heads x head_dim for causal attention (half the square).
double flops_per_token(const ModelConfig& model);

/// One of the shapes of the Mula family by its name in configs/ ("mula-7b-a1b"); nothing when unknown.
std::optional<ModelConfig> model_preset(const std::string& name);

}  // namespace optimus
