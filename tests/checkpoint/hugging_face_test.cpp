// Import and export: for each architecture a tiny random model under names and shapes written out here, apart from the
// table in the library, goes to a checkpoint and back bit for bit; what does not fit is refused by name.
#include <cstring>

#include <nlohmann/json.hpp>

#include "optimus/checkpoint/export.h"
#include "optimus/checkpoint/hugging_face_config.h"
#include "optimus/checkpoint/import.h"
#include "optimus/checkpoint/writer.h"
#include "support/temporary_folder.h"

namespace optimus {
namespace {

using nlohmann::json;
using testing::error_of;
using testing::mutated;
using testing::TemporaryFolder;
using testing::write_bytes;

constexpr int64_t kHidden = 8, kHeads = 2, kKvHeads = 1, kVocab = 12, kMlpWidth = 6, kExpertWidth = 4, kExperts = 3;

using Shapes = std::map<std::string, std::vector<int64_t>>;

json base_config(const std::string& type) {
  json config = {{"model_type", type},
                 {"hidden_size", kHidden},
                 {"num_hidden_layers", 2},
                 {"num_attention_heads", kHeads},
                 {"num_key_value_heads", kKvHeads},
                 {"vocab_size", kVocab},
                 {"max_position_embeddings", 16},
                 {"intermediate_size", kMlpWidth},
                 {"hidden_act", "silu"},
                 {"rope_theta", 500000.0}};
  if (type == "mistral") config["sliding_window"] = nullptr;
  if (type == "olmoe" || type == "mixtral") config["intermediate_size"] = kExpertWidth;
  if (type == "qwen3") config["head_dim"] = 6;
  if (type == "qwen3_moe")
    config.update(
        {{"head_dim", 6}, {"moe_intermediate_size", kExpertWidth}, {"mlp_only_layers", {0}}, {"norm_topk_prob", true}});
  if (type == "olmoe" || type == "qwen3_moe") config["num_experts"] = kExperts;
  if (type == "mixtral") config["num_local_experts"] = kExperts;
  if (config.contains("num_experts") || config.contains("num_local_experts")) {
    config["num_experts_per_tok"] = 2;
    config["router_aux_loss_coef"] = 0.02;
  }
  return config;
}

/// The tensors that transformers would save for base_config(type).
Shapes shapes_of(const std::string& type) {
  const int64_t head_dim = type.starts_with("qwen3") ? 6 : kHidden / kHeads;
  const int64_t q = kHeads * head_dim, kv = kKvHeads * head_dim;
  Shapes shapes = {{"model.embed_tokens.weight", {kVocab, kHidden}}, {"lm_head.weight", {kVocab, kHidden}}};
  if (type != "olmo") shapes["model.norm.weight"] = {kHidden};
  for (int layer = 0; layer < 2; ++layer) {
    const std::string at = fmt::format("model.layers.{}.", layer), attention = at + "self_attn.";
    shapes[attention + "q_proj.weight"] = {q, kHidden};
    shapes[attention + "k_proj.weight"] = {kv, kHidden};
    shapes[attention + "v_proj.weight"] = {kv, kHidden};
    shapes[attention + "o_proj.weight"] = {kHidden, q};
    if (type == "olmo2" || type == "olmoe" || type.starts_with("qwen3")) {
      shapes[attention + "q_norm.weight"] = {type.starts_with("qwen3") ? head_dim : q};
      shapes[attention + "k_norm.weight"] = {type.starts_with("qwen3") ? head_dim : kv};
    }
    if (type != "olmo") shapes[at + "post_attention_layernorm.weight"] = {kHidden};
    if (type == "olmo2") shapes[at + "post_feedforward_layernorm.weight"] = {kHidden};
    else if (type != "olmo") shapes[at + "input_layernorm.weight"] = {kHidden};
    const bool moe = type == "olmoe" || type == "mixtral" || (type == "qwen3_moe" && layer == 1);
    if (!moe) {
      shapes[at + "mlp.gate_proj.weight"] = shapes[at + "mlp.up_proj.weight"] = {kMlpWidth, kHidden};
      shapes[at + "mlp.down_proj.weight"] = {kHidden, kMlpWidth};
      continue;
    }
    const bool mixtral = type == "mixtral";
    const std::string block = at + (mixtral ? "block_sparse_moe." : "mlp.");
    shapes[block + "gate.weight"] = {kExperts, kHidden};
    for (int64_t e = 0; e < kExperts; ++e) {
      const std::string expert = fmt::format("{}experts.{}.", block, e);
      shapes[expert + (mixtral ? "w1.weight" : "gate_proj.weight")] = {kExpertWidth, kHidden};
      shapes[expert + (mixtral ? "w3.weight" : "up_proj.weight")] = {kExpertWidth, kHidden};
      shapes[expert + (mixtral ? "w2.weight" : "down_proj.weight")] = {kHidden, kExpertWidth};
    }
  }
  return shapes;
}

/// Finite random bits of the type, as a trained model might hold them, subnormal numbers included.
std::string random_weights(const std::string& dtype, int64_t elements, std::mt19937& generator) {
  std::string bytes;
  for (int64_t i = 0; i < elements; ++i) {
    const uint32_t word = generator() & 0xbf7fffffu;  // an exponent that is not all ones
    const uint16_t half = uint16_t(dtype == "F16" ? generator() & 0xbbffu : word >> 16);
    if (dtype == "F32") bytes.append(reinterpret_cast<const char*>(&word), 4);
    else bytes.append(reinterpret_cast<const char*>(&half), 2);
  }
  return bytes;
}

void write_tensors(const fs::path& path, const Shapes& shapes, const std::string& dtype, std::mt19937& generator) {
  std::vector<SafetensorsTensor> tensors;
  for (const auto& [name, shape] : shapes) {
    tensors.emplace_back();
    tensors.back().name = name;
    tensors.back().dtype = dtype;
    tensors.back().shape = shape;
  }
  SafetensorsWriter writer(path, tensors);
  for (const auto& [name, shape] : shapes) {
    const std::string bytes = random_weights(dtype, *checked_elements(shape), generator);
    writer.write(std::as_bytes(std::span(bytes.data(), bytes.size())));
  }
  writer.close();
}

void write_folder(const fs::path& folder, const json& config, const Shapes& shapes, const std::string& dtype = "F32") {
  make_folder(folder);
  std::mt19937 generator(1);
  write_bytes(folder / "config.json", config.dump(2));
  write_tensors(folder / "model.safetensors", shapes, dtype, generator);
}

/// Type, shape and bytes of every tensor in a folder.
std::map<std::string, std::string> contents_of(const fs::path& folder) {
  std::map<std::string, std::string> contents;
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    if (entry.path().extension() != ".safetensors") continue;
    const SafetensorsReader reader(entry.path());
    for (const SafetensorsTensor& tensor : reader.tensors()) {
      const auto bytes = reader.bytes(tensor);
      const std::string text(reinterpret_cast<const char*>(bytes.data()), bytes.size());
      EXPECT_TRUE(contents.emplace(tensor.name, tensor.dtype + json(tensor.shape).dump() + text).second);
    }
  }
  return contents;
}

std::vector<float> parameter(Checkpoint& checkpoint, const std::string& name) {
  const Shape global = checkpoint.manifest().tensors.at(name).global;
  std::vector<float> values(size_t(global.elements()));
  checkpoint.read({name, DType::f32, global, whole(global)}, std::as_writable_bytes(std::span(values)));
  return values;
}

class EachArchitecture : public ::testing::TestWithParam<std::string> {
 protected:
  TemporaryFolder folder_;
  const fs::path source_ = folder_.path() / "source", ours_ = folder_.path() / "ours", back_ = folder_.path() / "back";
};

TEST_P(EachArchitecture, ComesBackBitForBitInEveryType) {
  for (const std::string dtype : {"F32", "BF16", "F16"}) {
    for (const fs::path& path : {source_, ours_, back_}) fs::remove_all(path);
    write_folder(source_, base_config(GetParam()), shapes_of(GetParam()), dtype);
    write_bytes(source_ / "tokenizer.json", "{}");
    const json report = import_hugging_face(source_, ours_);
    EXPECT_EQ(report["architecture"], GetParam());
    Checkpoint checkpoint(ours_);
    EXPECT_TRUE(checkpoint.damages(Checkpoint::Check::kContents).empty());
    export_hugging_face(checkpoint, back_);
    EXPECT_EQ(contents_of(back_), contents_of(source_)) << dtype;
    EXPECT_EQ(read_text(back_ / "config.json"), read_text(source_ / "config.json"));
    EXPECT_TRUE(fs::exists(back_ / "tokenizer.json"));
  }
}

TEST_P(EachArchitecture, GeneratedConfigurationReadsBack) {
  const HuggingFaceModel read = read_hugging_face_config(base_config(GetParam()), "config.json");
  const json made = make_hugging_face_config(read.model, architecture_for(read.model), "float32");
  const HuggingFaceModel again = read_hugging_face_config(made, "made");
  EXPECT_TRUE(again.model == read.model) << made.dump();
}

TEST_P(EachArchitecture, EveryTensorIsNeededAndNoOtherIsTaken) {
  const Shapes shapes = shapes_of(GetParam());
  for (const auto& [name, shape] : shapes) {
    Shapes without = shapes;
    without.erase(name);
    write_folder(source_, base_config(GetParam()), without);
    EXPECT_MENTIONS(error_of(ErrorKind::kData, [&] { import_hugging_face(source_, ours_); }), name);
    Shapes wrong = shapes;
    ++wrong[name][0];
    write_folder(source_, base_config(GetParam()), wrong);
    EXPECT_MENTIONS(error_of(ErrorKind::kData, [&] { import_hugging_face(source_, ours_); }), name);
  }
  Shapes more = shapes;
  more["model.layers.0.self_attn.rotary_emb.inv_freq"] = {4};
  write_folder(source_, base_config(GetParam()), more);
  import_hugging_face(source_, ours_);
  more["model.layers.0.self_attn.q_proj.bias"] = {8};
  write_folder(source_, base_config(GetParam()), more);
  EXPECT_MENTIONS(error_of(ErrorKind::kData, [&] { import_hugging_face(source_, ours_); }), "q_proj.bias");
}

INSTANTIATE_TEST_SUITE_P(HuggingFace, EachArchitecture,
                         ::testing::Values("llama", "mistral", "olmo", "olmo2", "qwen3", "olmoe", "qwen3_moe",
                                           "mixtral"),
                         [](const auto& info) { return info.param; });

class HuggingFace : public ::testing::Test {
 protected:
  std::string config_refusal(const std::string& type, const json& changes) {
    json config = base_config(type);
    config.update(changes);
    return error_of(ErrorKind::kData, [&] { read_hugging_face_config(config, "config.json"); });
  }
  static ModelConfig model_of(const std::string& type, const json& changes = json::object()) {
    json config = base_config(type);
    config.update(changes);
    return read_hugging_face_config(config, "config.json").model;
  }
  std::string inexpressible(const ModelConfig& model) {
    return error_of(ErrorKind::kUsage, [&] { architecture_for(model); });
  }

  TemporaryFolder folder_;
  const fs::path source_ = folder_.path() / "source", ours_ = folder_.path() / "ours", back_ = folder_.path() / "back";
};

TEST_F(HuggingFace, RowsLieWhereTheModelReadsThem) {
  write_folder(source_, base_config("olmoe"), shapes_of("olmoe"));
  import_hugging_face(source_, ours_);
  Checkpoint checkpoint(ours_);
  const SafetensorsReader reader(source_ / "model.safetensors");
  const auto expect_at = [&](const std::string& theirs, const std::string& ours, size_t first) {
    const auto bytes = reader.bytes(*reader.find("model.layers.1." + theirs));
    const std::vector<float> values = parameter(checkpoint, "layers.1." + ours);
    ASSERT_LE(first * 4 + bytes.size(), values.size() * 4);
    EXPECT_EQ(std::memcmp(values.data() + first, bytes.data(), bytes.size()), 0) << theirs;
  };
  const size_t D = kHidden, F = kExpertWidth;
  expect_at("self_attn.q_proj.weight", "attention.qkv.weight", 0);
  expect_at("self_attn.k_proj.weight", "attention.qkv.weight", 8 * D);
  expect_at("self_attn.v_proj.weight", "attention.qkv.weight", 12 * D);
  expect_at("input_layernorm.weight", "attention.norm.weight", 0);
  expect_at("post_attention_layernorm.weight", "moe.norm.weight", 0);
  expect_at("mlp.experts.2.gate_proj.weight", "moe.gate_up.weight", 2 * 2 * F * D);
  expect_at("mlp.experts.2.up_proj.weight", "moe.gate_up.weight", 2 * 2 * F * D + F * D);
  expect_at("mlp.experts.2.down_proj.weight", "moe.down.weight", 2 * D * F);
}

TEST_F(HuggingFace, FusedExpertsOfMemoryAreTakenToo) {
  for (const std::string type : {"olmoe", "mixtral"}) {
    Shapes fused;
    for (const auto& [name, shape] : shapes_of(type))
      if (name.find("mlp.") == std::string::npos && name.find("block_sparse_moe.") == std::string::npos)
        fused[name] = shape;
    for (int layer = 0; layer < 2; ++layer) {
      const std::string block = fmt::format("model.layers.{}.mlp.", layer);
      fused[block + "gate.weight"] = {kExperts, kHidden};
      fused[block + "experts.gate_up_proj"] = {kExperts, 2 * kExpertWidth, kHidden};
      fused[block + "experts.down_proj"] = {kExperts, kHidden, kExpertWidth};
    }
    for (const fs::path& path : {source_, ours_, back_}) fs::remove_all(path);
    write_folder(source_, base_config(type), fused);
    import_hugging_face(source_, ours_);
    Checkpoint checkpoint(ours_);
    export_hugging_face(checkpoint, back_);
    EXPECT_EQ(contents_of(back_), contents_of(source_)) << "named as the imported folder named them";
    const SafetensorsReader reader(source_ / "model.safetensors");
    const std::vector<float> ours = parameter(checkpoint, "layers.0.moe.gate_up.weight");
    EXPECT_EQ(std::memcmp(ours.data(), reader.bytes(*reader.find("model.layers.0.mlp.experts.gate_up_proj")).data(),
                          ours.size() * 4),
              0);
  }
}

TEST_F(HuggingFace, ShardsAndIndexBothWays) {
  const Shapes shapes = shapes_of("olmoe");
  write_folder(source_, base_config("olmoe"), shapes);
  import_hugging_face(source_, ours_);
  Checkpoint checkpoint(ours_);
  const json report = export_hugging_face(checkpoint, back_, 1000);
  EXPECT_GT(report["files"].size(), 3u);
  EXPECT_EQ(contents_of(back_), contents_of(source_));
  const json index = json::parse(read_text(back_ / "model.safetensors.index.json"));
  EXPECT_EQ(index["weight_map"].size(), shapes.size());

  import_hugging_face(back_, folder_.path() / "again");
  Checkpoint again(folder_.path() / "again");
  EXPECT_EQ(parameter(again, "layers.0.moe.down.weight"), parameter(checkpoint, "layers.0.moe.down.weight"));
  const std::string shard = report["files"][1];
  fs::remove(back_ / shard);
  EXPECT_MENTIONS(error_of(ErrorKind::kData, [&] { import_hugging_face(back_, folder_.path() / "third"); }), shard);
  EXPECT_FALSE(fs::exists(folder_.path() / "third"));
}

TEST_F(HuggingFace, MixedTypesComeBack) {
  Shapes norms, matrices;
  for (const auto& [name, shape] : shapes_of("qwen3_moe")) (shape.size() == 1 ? norms : matrices)[name] = shape;
  write_folder(source_, base_config("qwen3_moe"), matrices, "BF16");
  std::mt19937 generator(2);
  write_tensors(source_ / "model-norms.safetensors", norms, "F32", generator);
  import_hugging_face(source_, ours_);
  Checkpoint checkpoint(ours_);
  EXPECT_EQ(export_hugging_face(checkpoint, back_)["dtype"], "BF16");
  EXPECT_EQ(contents_of(back_), contents_of(source_));
}

TEST_F(HuggingFace, ARunsCheckpointGetsAGeneratedConfiguration) {
  write_folder(source_, base_config("qwen3_moe"), shapes_of("qwen3_moe"));
  import_hugging_face(source_, ours_);
  Checkpoint imported(ours_);
  const fs::path run = folder_.path() / "run";  // the same weights as a run saves them: no source, optimizer state too
  std::vector<TensorPart> parts, moments;
  for (const auto& [name, record] : imported.manifest().tensors) {
    parts.push_back({name, DType::f32, record.global, whole(record.global)});
    moments.push_back({"m." + name, DType::f32, record.global, whole(record.global)});
  }
  CheckpointWriter writer(run, 7);
  writer.write("weights.safetensors", parts, [&](const TensorPart& part, int64_t first, std::span<std::byte> out) {
    std::memcpy(out.data(), parameter(imported, part.name).data() + first, out.size());
  });
  writer.write("optimizer.safetensors", moments,
               [](const TensorPart&, int64_t, std::span<std::byte> out) { std::memset(out.data(), 0, out.size()); });
  writer.commit(imported.manifest().config);

  Checkpoint checkpoint(run);
  EXPECT_EQ(export_hugging_face(checkpoint, back_)["architecture"], "qwen3_moe");
  EXPECT_EQ(contents_of(back_), contents_of(source_));
  import_hugging_face(back_, folder_.path() / "again");
  EXPECT_TRUE(model_config_of(Checkpoint(folder_.path() / "again")) == model_config_of(imported));
}

TEST_F(HuggingFace, TiedHeadHasNoTensor) {
  json config = base_config("llama");
  config["tie_word_embeddings"] = true;
  Shapes shapes = shapes_of("llama");
  write_folder(source_, config, shapes);  // a head of its own, although tied
  EXPECT_MENTIONS(error_of(ErrorKind::kData, [&] { import_hugging_face(source_, ours_); }), "lm_head.weight");
  shapes.erase("lm_head.weight");
  write_folder(source_, config, shapes);
  import_hugging_face(source_, ours_);
  Checkpoint checkpoint(ours_);
  EXPECT_FALSE(checkpoint.has("head.weight"));
  export_hugging_face(checkpoint, back_);
  EXPECT_EQ(contents_of(back_), contents_of(source_));
}

TEST_F(HuggingFace, ConfigurationOfBothVersions) {
  const ModelConfig four = model_of("olmoe", {{"pad_token_id", nullptr}, {"rms_norm_eps", 1e-6}});
  EXPECT_EQ(four.padding_token, -1);
  EXPECT_EQ(four.rope_theta, 5e5);
  EXPECT_EQ(four.norm_eps, 1e-6);
  EXPECT_EQ(four.sequence, 16);
  EXPECT_EQ(four.moe->balance, "loss");
  EXPECT_EQ(four.moe->balance_coef, 0.02);
  EXPECT_EQ(four.moe->balance_scope, "model");
  EXPECT_FALSE(four.moe->normalize_top_k);
  EXPECT_EQ(model_of("olmoe").padding_token, 1);  // its default where the key is absent
  EXPECT_EQ(model_of("olmoe", {{"router_aux_loss_coef", nullptr}}).moe->balance, "none");
  EXPECT_TRUE(model_of("mixtral").moe->normalize_top_k);
  EXPECT_EQ(model_of("qwen3_moe").moe->first_dense_layers, 1);

  json five = base_config("qwen3_moe");
  five.erase("rope_theta");
  five.erase("num_experts");
  five["num_local_experts"] = kExperts;
  five["rope_parameters"] = {{"rope_theta", 1e6}, {"rope_type", "default"}};
  const ModelConfig model = read_hugging_face_config(five, "config.json").model;
  EXPECT_EQ(model.rope_theta, 1e6);
  EXPECT_EQ(model.moe->experts, kExperts);
  EXPECT_EQ(model.head_dim, 6);
}

TEST_F(HuggingFace, RefusesWhatItWouldComputeDifferently) {
  EXPECT_MENTIONS(config_refusal("llama", {{"model_type", "gpt2"}}), "model_type");
  EXPECT_MENTIONS(config_refusal("llama", {{"attention_bias", true}}), "attention_bias");
  EXPECT_MENTIONS(config_refusal("llama", {{"mlp_bias", true}}), "mlp_bias");
  EXPECT_MENTIONS(config_refusal("llama", {{"hidden_act", "gelu"}}), "hidden_act");
  EXPECT_MENTIONS(config_refusal("llama", {{"rope_scaling", {{"rope_type", "llama3"}}}}), "rope_scaling");
  EXPECT_MENTIONS(config_refusal("llama", {{"rope_parameters", {{"rope_type", "yarn"}}}}), "rope_parameters");
  EXPECT_MENTIONS(config_refusal("mistral", {{"sliding_window", 8}}), "sliding_window");
  EXPECT_MENTIONS(config_refusal("olmo", {{"clip_qkv", 8.0}}), "clip_qkv");
  EXPECT_MENTIONS(config_refusal("qwen3_moe", {{"decoder_sparse_step", 2}}), "decoder_sparse_step");
  EXPECT_MENTIONS(config_refusal("qwen3_moe", {{"mlp_only_layers", {1}}}), "mlp_only_layers");
  EXPECT_MENTIONS(config_refusal("mixtral", {{"router_jitter_noise", 0.1}}), "router_jitter_noise");
  EXPECT_MENTIONS(config_refusal("llama", {{"hidden_size", "8"}}), "hidden_size");
  EXPECT_MENTIONS(config_refusal("llama", {{"num_hidden_layers", nullptr}}), "num_hidden_layers");
  EXPECT_EQ(model_of("mistral", {{"sliding_window", 16}}).sequence, 16);
}

TEST_F(HuggingFace, ModelsThatNoArchitectureHasAreRefusedByKey) {
  ModelConfig model = model_of("olmoe");
  model.moe->shared_experts = 1;
  EXPECT_MENTIONS(inexpressible(model), "model.moe.shared_experts");
  model = model_of("olmoe");
  model.moe->score = "sigmoid";
  EXPECT_MENTIONS(inexpressible(model), "model.moe.score");
  model = model_of("olmoe");
  model.moe->first_dense_layers = 1;
  EXPECT_MENTIONS(inexpressible(model), "model.moe.first_dense_layers");
  model = model_of("mixtral");
  model.moe->normalize_top_k = false;
  EXPECT_MENTIONS(inexpressible(model), "model.moe.normalize_top_k");
  model = model_of("llama");
  model.norm = "layer";
  EXPECT_MENTIONS(inexpressible(model), "model.norm");
  model = model_of("llama");
  model.qk_norm = "full";
  EXPECT_MENTIONS(inexpressible(model), "model.qk_norm");
  model = model_of("olmo");
  model.norm_eps = 1e-6;
  EXPECT_MENTIONS(inexpressible(model), "model.norm_eps");
}

TEST_F(HuggingFace, OnlyAnEarlierImportIsReplaced) {
  write_folder(source_, base_config("llama"), shapes_of("llama"));
  import_hugging_face(source_, ours_);
  import_hugging_face(source_, ours_);
  make_folder(back_);
  write_bytes(back_ / "thesis.tex", "x");
  EXPECT_MENTIONS(error_of(ErrorKind::kUsage, [&] { import_hugging_face(source_, back_); }), back_.string());
  Checkpoint checkpoint(ours_);
  EXPECT_MENTIONS(error_of(ErrorKind::kUsage, [&] { export_hugging_face(checkpoint, back_); }), back_.string());
}

TEST_F(HuggingFace, ConfigurationMutationsEndInAnErrorOrAnImport) {
  write_folder(source_, base_config("qwen3_moe"), shapes_of("qwen3_moe"));
  const std::string original = read_text(source_ / "config.json");
  std::mt19937 generator(9);
  int refused = 0;
  for (int i = 0; i < 500; ++i) {
    write_bytes(source_ / "config.json", mutated(original, generator));
    try {
      import_hugging_face(source_, ours_);
    } catch (const Error& error) {
      ASSERT_EQ(error.kind(), ErrorKind::kData) << error.what();
      ++refused;
    }
  }
  EXPECT_GT(refused, 250);
}

}  // namespace
}  // namespace optimus
