#include "optimus/checkpoint/hugging_face.h"

#include "optimus/checkpoint/manifest.h"

namespace optimus {
namespace {

constexpr HuggingFaceArchitecture kArchitectures[] = {
    {"llama", "LlamaForCausalLM", "rms", "pre", "none", false, 1e-6, 1e4, -1, "", "", "", ""},
    {"mistral", "MistralForCausalLM", "rms", "pre", "none", false, 1e-6, 1e4, -1, "", "", "", ""},
    {"olmo", "OlmoForCausalLM", "layer_nonparametric", "pre", "none", false, 1e-5, 1e4, 1, "", "", "", ""},
    {"olmo2", "Olmo2ForCausalLM", "rms", "post", "full", false, 1e-5, 1e4, 1, "", "", "", ""},
    {"qwen3", "Qwen3ForCausalLM", "rms", "pre", "head", false, 1e-6, 1e4, -1, "", "", "", ""},
    {"olmoe", "OlmoeForCausalLM", "rms", "pre", "full", true, 1e-5, 1e4, 1, "mlp", "gate_proj", "up_proj", "down_proj"},
    {"qwen3_moe", "Qwen3MoeForCausalLM", "rms", "pre", "head", true, 1e-6, 1e4, -1, "mlp", "gate_proj", "up_proj",
     "down_proj"},
    {"mixtral", "MixtralForCausalLM", "rms", "pre", "none", true, 1e-5, 1e6, -1, "block_sparse_moe", "w1", "w3", "w2"},
};

/// Appends rows; a parameter is named once and its tensors are given as consecutive ranges of its rows.
class Rows {
 public:
  void whole_tensor(const std::string& name, const std::string& parameter, Shape shape) {
    rows_.push_back({name, shape, parameter, shape, whole(shape)});
  }

  /// Tensors stacked along the first dimension of a matrix [rows, columns].
  struct Range {
    std::string name;
    int64_t rows;
  };
  void stacked(const std::string& parameter, int64_t columns, const std::vector<Range>& ranges) {
    Shape global{0, columns};
    for (const Range& range : ranges) global[0] += range.rows;
    int64_t begin = 0;
    for (const Range& range : ranges) {
      const Shape shape{range.rows, columns};
      rows_.push_back({range.name, shape, parameter, global, {{begin, 0}, shape}});
      begin += range.rows;
    }
  }

  /// Rows [begin, begin + rows) of expert e in a parameter [E, all rows, columns].
  void of_expert(const std::string& name, const std::string& parameter, Shape global, int64_t expert, int64_t begin,
                 int64_t rows) {
    rows_.push_back({name, {rows, global[2]}, parameter, global, {{expert, begin, 0}, {1, rows, global[2]}}});
  }

  std::vector<HuggingFaceTensor> take() { return std::move(rows_); }

 private:
  std::vector<HuggingFaceTensor> rows_;
};

void add_attention(Rows& rows, const ModelConfig& model, const std::string& theirs, const std::string& ours) {
  rows.stacked(ours + "qkv.weight", model.hidden,
               {{theirs + "q_proj.weight", model.query_width()},
                {theirs + "k_proj.weight", model.kv_width()},
                {theirs + "v_proj.weight", model.kv_width()}});
  if (model.qk_norm != "none") {
    const bool per_head = model.qk_norm == "head";
    rows.whole_tensor(theirs + "q_norm.weight", ours + "q_norm.weight",
                      {per_head ? model.head_dim : model.query_width()});
    rows.whole_tensor(theirs + "k_norm.weight", ours + "k_norm.weight", {per_head ? model.head_dim : model.kv_width()});
  }
  rows.whole_tensor(theirs + "o_proj.weight", ours + "output.weight", {model.hidden, model.query_width()});
}

void add_mlp(Rows& rows, const ModelConfig& model, const std::string& theirs, const std::string& ours) {
  rows.stacked(ours + "gate_up.weight", model.hidden,
               {{theirs + "gate_proj.weight", model.mlp_width}, {theirs + "up_proj.weight", model.mlp_width}});
  rows.whole_tensor(theirs + "down_proj.weight", ours + "down.weight", {model.hidden, model.mlp_width});
}

void add_moe(Rows& rows, const ModelConfig& model, const HuggingFaceArchitecture& architecture, ExpertNames names,
             const std::string& layer, const std::string& ours) {
  const MoeConfig& moe = *model.moe;
  const Shape gate_up{moe.experts, 2 * moe.width, model.hidden}, down{moe.experts, model.hidden, moe.width};
  // In memory transformers 5 calls the block "mlp" in every architecture.
  const bool fused = names == ExpertNames::kFused;
  const std::string theirs = layer + (fused ? "mlp" : std::string(architecture.moe_block)) + ".";
  rows.whole_tensor(theirs + "gate.weight", ours + "router.weight", {moe.experts, model.hidden});
  if (fused) {
    rows.whole_tensor(theirs + "experts.gate_up_proj", ours + "gate_up.weight", gate_up);
    rows.whole_tensor(theirs + "experts.down_proj", ours + "down.weight", down);
    return;
  }
  for (int64_t expert = 0; expert < moe.experts; ++expert) {
    const std::string matrix = fmt::format("{}experts.{}.", theirs, expert);
    rows.of_expert(fmt::format("{}{}.weight", matrix, architecture.gate), ours + "gate_up.weight", gate_up, expert, 0,
                   moe.width);
    rows.of_expert(fmt::format("{}{}.weight", matrix, architecture.up), ours + "gate_up.weight", gate_up, expert,
                   moe.width, moe.width);
    rows.of_expert(fmt::format("{}{}.weight", matrix, architecture.down), ours + "down.weight", down, expert, 0,
                   model.hidden);
  }
}

[[noreturn]] void inexpressible(std::string_view key, const std::string& value, std::string_view why) {
  fail(ErrorKind::kUsage, "no Hugging Face architecture expresses model.{} = {}: {}", key, value, why);
}

/// Keys whose other values no architecture of the table has.
void check_expressible(const ModelConfig& model) {
  if (model.objective != "causal") inexpressible("objective", model.objective, "all are causal");
  if (model.norm == "layer") inexpressible("norm", model.norm, "the norms are \"rms\" and \"layer_nonparametric\"");
  if (!model.moe) return;
  const MoeConfig& moe = *model.moe;
  if (moe.shared_experts > 0)
    inexpressible("moe.shared_experts", fmt::to_string(moe.shared_experts), "none has shared experts");
  if (moe.score != "softmax") inexpressible("moe.score", moe.score, "all score with softmax");
  if (moe.score_scale != 1.0) inexpressible("moe.score_scale", fmt::to_string(moe.score_scale), "none scales gates");
  if (moe.groups != 1) inexpressible("moe.groups", fmt::to_string(moe.groups), "none groups experts");
  if (moe.balance == "bias") inexpressible("moe.balance", moe.balance, "none has selection biases");
}

/// What the architecture that fits in norms and kind still does not allow.
void check_details(const ModelConfig& model, const HuggingFaceArchitecture& architecture) {
  const std::string_view type = architecture.model_type;
  if (type == "olmo" && model.norm_eps != architecture.norm_eps)
    inexpressible("norm_eps", fmt::to_string(model.norm_eps), "olmo fixes it at 1e-5");
  if ((type == "olmo" || type == "olmo2" || type == "olmoe") && model.query_width() != model.hidden)
    inexpressible("head_dim", fmt::to_string(model.head_dim), fmt::format("{} needs heads * head_dim = hidden", type));
  if (!model.moe) return;
  if (type != "qwen3_moe" && model.moe->first_dense_layers > 0)
    inexpressible("moe.first_dense_layers", fmt::to_string(model.moe->first_dense_layers),
                  fmt::format("with qk_norm = \"{}\" it is {}, whose layers are all MoE", model.qk_norm, type));
  if (type == "mixtral" && !model.moe->normalize_top_k)
    inexpressible("moe.normalize_top_k", "false", "with qk_norm = \"none\" it is mixtral, which normalises");
}

}  // namespace

std::span<const HuggingFaceArchitecture> hugging_face_architectures() { return kArchitectures; }

const HuggingFaceArchitecture* find_architecture(std::string_view model_type) {
  for (const HuggingFaceArchitecture& architecture : kArchitectures)
    if (architecture.model_type == model_type) return &architecture;
  return nullptr;
}

const HuggingFaceArchitecture& architecture_for(const ModelConfig& model) {
  check_expressible(model);
  bool norms_fit = false;
  for (const HuggingFaceArchitecture& architecture : kArchitectures) {
    if (architecture.moe != model.moe.has_value()) continue;
    if (architecture.norm != model.norm || architecture.norm_position != model.norm_position) continue;
    norms_fit = true;
    if (architecture.qk_norm != model.qk_norm) continue;
    check_details(model, architecture);
    return architecture;
  }
  const std::string kind = fmt::format("no {} model has it with norm = \"{}\", norm_position = \"{}\"",
                                       model.moe ? "MoE" : "dense", model.norm, model.norm_position);
  if (norms_fit) inexpressible("qk_norm", model.qk_norm, kind);
  inexpressible(model.norm_position == "post" ? "norm_position" : "norm",
                model.norm_position == "post" ? model.norm_position : model.norm, kind);
}

int64_t HuggingFaceTensor::first_element() const {
  int64_t index = 0;
  for (int i = 0; i < parameter_shape.rank(); ++i) index = index * parameter_shape[i] + box.begin[i];
  return index;
}

std::vector<HuggingFaceTensor> hugging_face_tensors(const ModelConfig& model,
                                                    const HuggingFaceArchitecture& architecture, ExpertNames experts) {
  const bool parametric = model.norm != "layer_nonparametric", post = model.norm_position == "post";
  Rows rows;
  rows.whole_tensor("model.embed_tokens.weight", "embedding.weight", {model.vocab, model.hidden});
  for (int64_t i = 0; i < model.layers; ++i) {
    const std::string theirs = fmt::format("model.layers.{}.", i), ours = fmt::format("layers.{}.", i);
    const std::string block = ours + (model.moe_layer(i) ? "moe." : "mlp.");
    if (parametric) {
      rows.whole_tensor(theirs + (post ? "post_attention_layernorm.weight" : "input_layernorm.weight"),
                        ours + "attention.norm.weight", {model.hidden});
      rows.whole_tensor(theirs + (post ? "post_feedforward_layernorm.weight" : "post_attention_layernorm.weight"),
                        block + "norm.weight", {model.hidden});
    }
    add_attention(rows, model, theirs + "self_attn.", ours + "attention.");
    if (model.moe_layer(i)) add_moe(rows, model, architecture, experts, theirs, block);
    else add_mlp(rows, model, theirs + "mlp.", block);
  }
  if (parametric) rows.whole_tensor("model.norm.weight", "final_norm.weight", {model.hidden});
  if (!model.tie_embeddings) rows.whole_tensor("lm_head.weight", "head.weight", {model.vocab, model.hidden});
  return rows.take();
}

}  // namespace optimus
