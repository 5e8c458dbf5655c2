#include "optimus/model/config.h"

#include "optimus/base/error.h"

namespace optimus {
namespace {

constexpr auto kUsage = ErrorKind::kUsage;

// Far beyond any model, and small enough that products of a few of them stay inside 64 bits.
void check_size(const std::string& where, const char* key, int64_t value, int64_t smallest, int64_t largest) {
  require(value >= smallest && value <= largest, kUsage, "{}: model.{} = {} must lie between {} and {}", where, key,
          value, smallest, largest);
}
constexpr int64_t kLargestWidth = int64_t(1) << 24;

void check_moe(const MoeConfig& moe, int64_t layers, const std::string& where) {
  check_size(where, "moe.experts", moe.experts, 1, int64_t(1) << 20);
  require(moe.top_k >= 1 && moe.top_k <= moe.experts, kUsage,
          "{}: model.moe.top_k = {} must lie between 1 and model.moe.experts = {}", where, moe.top_k, moe.experts);
  check_size(where, "moe.width", moe.width, 1, kLargestWidth);
  check_size(where, "moe.shared_experts", moe.shared_experts, 0, int64_t(1) << 20);
  check_size(where, "moe.shared_width", moe.shared_width, 0, kLargestWidth);
  require(moe.first_dense_layers >= 0 && moe.first_dense_layers <= layers, kUsage,
          "{}: model.moe.first_dense_layers = {} must lie between 0 and model.layers = {}", where,
          moe.first_dense_layers, layers);
  require(moe.groups >= 1 && moe.experts % moe.groups == 0, kUsage,
          "{}: model.moe.groups = {} must divide model.moe.experts = {}", where, moe.groups, moe.experts);
  require(moe.top_groups >= 1 && moe.top_groups <= moe.groups, kUsage,
          "{}: model.moe.top_groups = {} must lie between 1 and model.moe.groups = {}", where, moe.top_groups,
          moe.groups);
  require(moe.top_k <= moe.top_groups * (moe.experts / moe.groups), kUsage,
          "{}: model.moe.top_k = {} exceeds the {} experts that top_groups = {} leaves to choose from", where,
          moe.top_k, moe.top_groups * (moe.experts / moe.groups), moe.top_groups);
  require(moe.balance != "bias" && moe.bias_update == 0, kUsage,
          "{}: model.moe.balance = \"bias\" is not implemented yet; use \"loss\" or \"none\" and bias_update = 0",
          where);
  require(moe.balance_coef >= 0 && moe.z_loss_coef >= 0, kUsage,
          "{}: model.moe.balance_coef and z_loss_coef must not be negative", where);
}

}  // namespace

void ModelConfig::resolve(const std::string& where) {
  check_size(where, "layers", layers, 1, 10000);
  check_size(where, "hidden", hidden, 1, kLargestWidth);
  check_size(where, "heads", heads, 1, int64_t(1) << 16);
  if (kv_heads == 0) kv_heads = heads;
  require(kv_heads >= 1 && heads % kv_heads == 0, kUsage, "{}: model.kv_heads = {} must divide model.heads = {}", where,
          kv_heads, heads);
  if (head_dim == 0) {
    require(hidden % heads == 0, kUsage,
            "{}: model.hidden = {} is not divisible by model.heads = {}; change one or set model.head_dim", where,
            hidden, heads);
    head_dim = hidden / heads;
  }
  check_size(where, "head_dim", head_dim, 1, int64_t(1) << 16);
  require(head_dim >= 2 && head_dim % 2 == 0, kUsage, "{}: model.head_dim = {} must be even (rotary pairs)", where,
          head_dim);
  if (mlp_width == 0) mlp_width = 4 * hidden;
  check_size(where, "mlp_width", mlp_width, 1, kLargestWidth);
  check_size(where, "sequence", sequence, 2, (int64_t(1) << 31) - 1);
  check_size(where, "vocab", vocab, 1, (int64_t(1) << 31) - 1);
  require(padding_token >= -1 && padding_token < vocab, kUsage,
          "{}: model.padding_token = {} must be -1 (none) or below model.vocab = {}", where, padding_token, vocab);
  require(norm_eps > 0, kUsage, "{}: model.norm_eps = {} must be positive", where, norm_eps);
  require(rope_theta > 0, kUsage, "{}: model.rope_theta = {} must be positive", where, rope_theta);
  require(init_std >= 0, kUsage, "{}: model.init_std = {} must not be negative", where, init_std);
  require(objective == "causal", kUsage, "{}: model.objective = \"{}\" is not implemented yet; use \"causal\"", where,
          objective);
  if (moe) check_moe(*moe, layers, where);
  const double parameters =
      double(layers) * double(hidden) * (moe ? 3.0 * double(moe->experts) * double(moe->width) : double(mlp_width));
  require(parameters < 1e15, kUsage, "{}: a model of {:.1e} parameters is beyond any machine", where, parameters);
}

double flops_per_token(const ModelConfig& model) {
  const double hidden = double(model.hidden);
  double active = hidden * double(model.vocab);  // the head; the input embedding is a look-up
  for (int64_t layer = 0; layer < model.layers; ++layer) {
    active += hidden * double(2 * model.query_width() + 2 * model.kv_width());
    if (model.moe_layer(layer))
      active +=
          hidden * double(model.moe->experts + 3 * model.moe->top_k * model.moe->width + 3 * model.shared_mlp_width());
    else active += 3.0 * hidden * double(model.mlp_width);
  }
  return 6.0 * active + 6.0 * double(model.layers) * double(model.sequence) * double(model.query_width());
}

std::optional<ModelConfig> model_preset(const std::string& name) {
  ModelConfig model;
  model.vocab = 50304;
  model.sequence = 2048;
  model.padding_token = 1;
  model.heads = 16;
  model.hidden = 2048;
  model.layers = 16;
  if (name == "mula-1b") {
    model.mlp_width = 8192;
    model.norm = "layer_nonparametric";
    return model;
  }
  MoeConfig moe;
  moe.experts = 64;
  moe.top_k = 8;
  moe.width = 1024;
  moe.balance_scope = "model";
  model.qk_norm = "full";
  if (name == "mula-7b-a1b") {
    // the base shape
  } else if (name == "mula-20b-a2b") {
    model.layers = 32;
    moe.experts = 96;
  } else if (name == "mula-100b-a7b" || name == "mula-220b-a10b") {
    model.hidden = 3072;
    model.heads = 24;
    moe.width = 1536;
    model.layers = name == "mula-100b-a7b" ? 48 : 64;
    moe.experts = name == "mula-100b-a7b" ? 144 : 240;
  } else {
    return std::nullopt;
  }
  model.moe = moe;
  return model;
}

}  // namespace optimus
