#include "optimus/checkpoint/hugging_face_config.h"

#include "optimus/base/json.h"

namespace optimus {
namespace {

using nlohmann::json;

/// Far above every real size, and small enough that sizes can be added and two multiplied without overflow.
constexpr int64_t kLargest = (int64_t(1) << 31) - 1;

/// Typed reading of config.json; null counts as absent, as it does in transformers.
class Keys {
 public:
  Keys(const json& object, const std::string& file) : object_(object), file_(file) {}

  bool has(const std::string& key) const { return object_.contains(key); }
  const json* find(const std::string& key) const {
    const auto found = object_.find(key);
    return found == object_.end() || found->is_null() ? nullptr : &*found;
  }
  int64_t integer(const std::string& key) const {
    const json* value = find(key);
    require(value, ErrorKind::kData, "{}: the key {} is missing", file_, key);
    const int64_t number = natural_of(*value, file_ + ": " + key);
    if (number > kLargest) refuse(key, fmt::format("at most {} is", kLargest));
    return number;
  }
  int64_t integer(const std::string& key, int64_t absent) const { return find(key) ? integer(key) : absent; }
  double number(const std::string& key, double absent) const {
    const json* value = find(key);
    if (value && !value->is_number()) refuse(key, "expected a number");
    return value ? value->get<double>() : absent;
  }
  bool boolean(const std::string& key, bool absent) const {
    const json* value = find(key);
    if (value && !value->is_boolean()) refuse(key, "expected true or false");
    return value ? value->get<bool>() : absent;
  }
  std::string text(const std::string& key, const std::string& absent) const {
    const json* value = find(key);
    if (value && !value->is_string()) refuse(key, "expected a string");
    return value ? value->get<std::string>() : absent;
  }
  [[noreturn]] void refuse(const std::string& key, const std::string& why) const {
    const json* value = find(key);
    fail(ErrorKind::kData, "{}: {} = {} is not supported: {}", file_, key, value ? value->dump() : "null", why);
  }

 private:
  const json& object_;
  const std::string& file_;
};

double rope_theta_of(const Keys& keys, const HuggingFaceArchitecture& architecture, const std::string& file) {
  double theta = keys.number("rope_theta", architecture.rope_theta);
  for (const char* name : {"rope_parameters", "rope_scaling"}) {  // transformers 5, transformers 4
    const json* value = keys.find(name);
    if (!value) continue;
    if (!value->is_object()) keys.refuse(name, "expected an object");
    const Keys rope(*value, file);
    if (rope.text("rope_type", rope.text("type", "default")) != "default")
      keys.refuse(name, "only rope_type \"default\" is");
    if (rope.number("partial_rotary_factor", 1.0) != 1.0) keys.refuse(name, "heads are rotated whole");
    for (const auto& [key, nested] : value->items())
      if (nested.is_object()) keys.refuse(name, "all layers must share one set of parameters");
    theta = rope.number("rope_theta", theta);
  }
  if (keys.number("partial_rotary_factor", 1.0) != 1.0) keys.refuse("partial_rotary_factor", "heads are rotated whole");
  return theta;
}

/// Attention sees the whole sequence in Optimus, so a sliding window may only be as long as that.
void check_window(const Keys& keys, const std::string& type, int64_t sequence) {
  constexpr int64_t kMistralWindow = 4096;  // its default; an explicit null turns the window off
  const bool qwen = type == "qwen3" || type == "qwen3_moe";
  bool slides = qwen ? keys.boolean("use_sliding_window", false)
                     : keys.find("sliding_window") || (type == "mistral" && !keys.has("sliding_window"));
  if (const json* layers = keys.find("layer_types")) {
    if (!layers->is_array()) keys.refuse("layer_types", "expected an array");
    for (const json& layer : *layers) {
      if (layer != "full_attention" && layer != "sliding_attention")
        keys.refuse("layer_types", "all layers must be \"full_attention\"");
      slides = slides || layer == "sliding_attention";
    }
  }
  const int64_t window = keys.integer("sliding_window", kMistralWindow);
  if (slides && window < sequence)
    keys.refuse("sliding_window",
                fmt::format("attention over a window shorter than max_position_embeddings = {}", sequence));
}

void check_unsupported(const Keys& keys, const std::string& type, int64_t sequence) {
  for (const char* key : {"attention_bias", "mlp_bias"})
    if (keys.boolean(key, false)) keys.refuse(key, "projections have no bias here");
  if (keys.text("hidden_act", "silu") != "silu") keys.refuse("hidden_act", "the activation must be \"silu\"");
  if (keys.find("clip_qkv")) keys.refuse("clip_qkv", "queries, keys and values are not clipped here");
  if (keys.number("router_jitter_noise", 0.0) != 0.0)
    keys.refuse("router_jitter_noise", "the router's input gets no noise here");
  check_window(keys, type, sequence);
}

MoeConfig read_moe(const Keys& keys, const std::string& type) {
  MoeConfig moe;
  moe.experts = keys.find("num_experts") ? keys.integer("num_experts") : keys.integer("num_local_experts");
  moe.top_k = keys.integer("num_experts_per_tok");
  moe.width = keys.integer(type == "qwen3_moe" ? "moe_intermediate_size" : "intermediate_size");
  moe.normalize_top_k = type == "mixtral" || keys.boolean("norm_topk_prob", false);
  if (keys.integer("decoder_sparse_step", 1) != 1)
    keys.refuse("decoder_sparse_step", "MoE layers must follow each other without gaps");
  if (const json* dense = keys.find("mlp_only_layers")) {
    std::vector<int64_t> layers = naturals_of(*dense, "config.json: mlp_only_layers");
    std::sort(layers.begin(), layers.end());
    for (size_t i = 0; i < layers.size(); ++i)
      if (layers[i] != int64_t(i)) keys.refuse("mlp_only_layers", "dense layers must be the first ones");
    moe.first_dense_layers = int64_t(layers.size());
  }
  moe.balance = "none";
  if (keys.find("router_aux_loss_coef")) {
    moe.balance = "loss";
    moe.balance_coef = keys.number("router_aux_loss_coef", 0.0);
    moe.balance_scope = "model";
    moe.balance_unit = "micro_batch";
  }
  return moe;
}

int64_t padding_of(const Keys& keys, const HuggingFaceArchitecture& architecture) {
  if (!keys.has("pad_token_id")) return architecture.padding_token;
  const json* value = keys.find("pad_token_id");
  return !value || *value == -1 ? -1 : keys.integer("pad_token_id");
}

}  // namespace

HuggingFaceModel read_hugging_face_config(const json& config, const std::string& file) {
  const std::string type = string_member(config, "model_type", file);
  const HuggingFaceArchitecture* architecture = find_architecture(type);
  if (!architecture) {
    std::string known;
    for (const HuggingFaceArchitecture& one : hugging_face_architectures())
      known += fmt::format("{}{}", known.empty() ? "" : ", ", one.model_type);
    fail(ErrorKind::kData, "{}: model_type = \"{}\" is not supported; the supported ones are {}", file, type, known);
  }
  const Keys keys(config, file);
  ModelConfig model;
  model.layers = keys.integer("num_hidden_layers");
  model.hidden = keys.integer("hidden_size");
  model.heads = keys.integer("num_attention_heads");
  model.kv_heads = keys.integer("num_key_value_heads", model.heads);
  model.head_dim = keys.integer("head_dim", type == "qwen3" ? 128 : 0);  // 0: hidden / heads
  model.vocab = keys.integer("vocab_size");
  model.sequence = keys.integer("max_position_embeddings");
  model.norm = architecture->norm;
  model.norm_position = architecture->norm_position;
  model.qk_norm = architecture->qk_norm;
  model.norm_eps = keys.number("rms_norm_eps", architecture->norm_eps);
  model.rope_theta = rope_theta_of(keys, *architecture, file);
  model.mlp_width = keys.integer("intermediate_size");
  model.tie_embeddings = keys.boolean("tie_word_embeddings", false);
  model.init_std = keys.number("initializer_range", 0.02);
  model.padding_token = padding_of(keys, *architecture);
  if (architecture->moe) model.moe = read_moe(keys, type);
  check_unsupported(keys, type, model.sequence);
  try {
    model.resolve(file);
  } catch (const Error& error) {
    throw Error(ErrorKind::kData, error.what());
  }
  return {architecture, model};
}

json make_hugging_face_config(const ModelConfig& model, const HuggingFaceArchitecture& architecture,
                              const std::string& torch_dtype) {
  const std::string type(architecture.model_type);
  json config = {{"architectures", {architecture.class_name}},
                 {"model_type", type},
                 {"torch_dtype", torch_dtype},
                 {"vocab_size", model.vocab},
                 {"hidden_size", model.hidden},
                 {"intermediate_size", model.mlp_width},
                 {"num_hidden_layers", model.layers},
                 {"num_attention_heads", model.heads},
                 {"num_key_value_heads", model.kv_heads},
                 {"head_dim", model.head_dim},
                 {"hidden_act", "silu"},
                 {"max_position_embeddings", model.sequence},
                 {"initializer_range", model.init_std},
                 {"rope_theta", model.rope_theta},
                 {"rope_parameters", {{"rope_theta", model.rope_theta}, {"rope_type", "default"}}},
                 {"attention_bias", false},
                 {"tie_word_embeddings", model.tie_embeddings},
                 {"pad_token_id", nullptr},
                 {"bos_token_id", nullptr},
                 {"eos_token_id", nullptr}};
  if (model.padding_token >= 0) config["pad_token_id"] = model.padding_token;
  if (model.norm == "rms") config["rms_norm_eps"] = model.norm_eps;
  if (!model.moe) return config;
  const MoeConfig& moe = *model.moe;
  config[type == "mixtral" ? "num_local_experts" : "num_experts"] = moe.experts;
  config["num_experts_per_tok"] = moe.top_k;
  config[type == "qwen3_moe" ? "moe_intermediate_size" : "intermediate_size"] = moe.width;
  if (type != "mixtral") config["norm_topk_prob"] = moe.normalize_top_k;
  if (moe.balance == "loss") config["router_aux_loss_coef"] = moe.balance_coef;
  if (type == "qwen3_moe") {
    config["decoder_sparse_step"] = 1;
    json& dense = config["mlp_only_layers"] = json::array();
    for (int64_t layer = 0; layer < moe.first_dense_layers; ++layer) dense.push_back(layer);
  }
  return config;
}

}  // namespace optimus
