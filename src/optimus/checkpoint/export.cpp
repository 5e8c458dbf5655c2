#include "optimus/checkpoint/export.h"

#include <set>

#include "optimus/base/json.h"
#include "optimus/checkpoint/convert.h"
#include "optimus/checkpoint/hugging_face_config.h"
#include "optimus/checkpoint/writer.h"

namespace optimus {
namespace {

using nlohmann::json;

/// A tensor to be written, with the part of our parameter that it is.
struct Exported {
  SafetensorsTensor tensor;
  TensorPart part;
  int64_t bytes;
};

std::vector<Exported> exported_of(const Checkpoint& checkpoint, const std::string& dtype) {
  json others = json::object();
  if (checkpoint.manifest().source.is_object()) others = checkpoint.manifest().source.value("other_dtypes", others);
  std::vector<Exported> list;
  for (const HuggingFaceTensor& row : hugging_face_tensors(checkpoint)) {
    Exported one;
    one.tensor.name = row.name;
    one.tensor.dtype = others.value(row.name, dtype);
    require(is_weight_type(one.tensor.dtype), ErrorKind::kData, "{}: source: tensor {} of type {}",
            checkpoint.folder().string(), row.name, one.tensor.dtype);
    for (int i = 0; i < row.shape.rank(); ++i) one.tensor.shape.push_back(row.shape[i]);
    one.part = {row.parameter, DType::f32, row.parameter_shape, row.box};
    one.bytes = row.shape.elements() * *safetensors_size(one.tensor.dtype);
    list.push_back(std::move(one));
  }
  return list;
}

/// Every parameter of the checkpoint must be exported; the table covers those of the model.
void check_complete(const Checkpoint& checkpoint, const std::vector<Exported>& list) {
  std::set<std::string> covered;
  for (const Exported& one : list) covered.insert(one.part.name);
  for (const auto& [name, record] : checkpoint.manifest().tensors)
    require(!is_parameter(name) || covered.contains(name), ErrorKind::kData,
            "{}: tensor {} has no name in the Hugging Face format", checkpoint.folder().string(), name);
}

/// Consecutive tensors, each list up to `shard_bytes` (or one larger tensor).
std::vector<std::vector<Exported>> shards_of(std::vector<Exported> list, int64_t shard_bytes) {
  std::vector<std::vector<Exported>> shards;
  int64_t bytes = 0;
  for (Exported& one : list) {
    if (shards.empty() || bytes + one.bytes > shard_bytes) {
      shards.emplace_back();
      bytes = 0;
    }
    bytes += one.bytes;
    shards.back().push_back(std::move(one));
  }
  return shards;
}

void write_shard(Checkpoint& checkpoint, const std::vector<Exported>& shard, const fs::path& path) {
  std::vector<SafetensorsTensor> tensors;
  for (const Exported& one : shard) tensors.push_back(one.tensor);
  SafetensorsWriter writer(path, tensors);
  std::vector<std::byte> narrowed;
  for (const Exported& one : shard) {
    checkpoint.load({one.part}, [&](const TensorPart&, int64_t, std::span<const std::byte> bytes) {
      const std::span floats(reinterpret_cast<const float*>(bytes.data()), bytes.size() / sizeof(float));
      narrowed.resize(floats.size() * size_t(*safetensors_size(one.tensor.dtype)));
      narrow(one.tensor.dtype, floats, narrowed.data());
      writer.write(narrowed);
    });
  }
  writer.close();
}

std::vector<std::string> write_weights(Checkpoint& checkpoint, const std::vector<std::vector<Exported>>& shards,
                                       const fs::path& folder) {
  std::vector<std::string> files;
  json weight_map = json::object();
  int64_t total = 0;
  for (size_t i = 0; i < shards.size(); ++i) {
    files.push_back(shards.size() == 1 ? "model.safetensors"
                                       : fmt::format("model-{:05d}-of-{:05d}.safetensors", i + 1, shards.size()));
    write_shard(checkpoint, shards[i], folder / files.back());
    for (const Exported& one : shards[i]) {
      weight_map[one.tensor.name] = files.back();
      total += one.bytes;
    }
  }
  if (shards.size() > 1) {
    const json index = {{"metadata", {{"total_size", total}}}, {"weight_map", std::move(weight_map)}};
    write_text_atomically(folder / "model.safetensors.index.json", index.dump(2) + "\n");
  }
  return files;
}

std::string torch_name(const std::string& dtype) {
  return dtype == "BF16" ? "bfloat16" : dtype == "F16" ? "float16" : "float32";
}

void write_configuration(const Checkpoint& checkpoint, const fs::path& folder, const std::string& dtype) {
  const fs::path passed_through = checkpoint.folder() / "hf";
  if (fs::is_directory(passed_through)) {
    for (const fs::directory_entry& entry : fs::directory_iterator(passed_through))
      copy_file_durably(entry.path(), folder / entry.path().filename());
  } else {
    const json config =
        make_hugging_face_config(model_config_of(checkpoint), architecture_of(checkpoint), torch_name(dtype));
    write_text_atomically(folder / "config.json", config.dump(2) + "\n");
  }
}

}  // namespace

const HuggingFaceArchitecture& architecture_of(const Checkpoint& checkpoint) {
  const json& source = checkpoint.manifest().source;
  if (source.is_null()) return architecture_for(model_config_of(checkpoint));
  const std::string where = (checkpoint.folder() / "manifest.json").string() + ": source";
  const std::string name = string_member(source, "architecture", where);
  const HuggingFaceArchitecture* architecture = find_architecture(name);
  require(architecture, ErrorKind::kData, "{}: unknown architecture {}", where, name);
  return *architecture;
}

std::vector<HuggingFaceTensor> hugging_face_tensors(const Checkpoint& checkpoint) {
  const json& source = checkpoint.manifest().source;
  const bool fused = source.is_object() && source.value("experts", "separate") == "fused";
  return hugging_face_tensors(model_config_of(checkpoint), architecture_of(checkpoint),
                              fused ? ExpertNames::kFused : ExpertNames::kSeparate);
}

json export_hugging_face(Checkpoint& checkpoint, const fs::path& out, int64_t shard_bytes) {
  std::error_code ignored;
  require(!fs::exists(out, ignored) || fs::is_empty(out, ignored), ErrorKind::kUsage,
          "--out {} exists and is not empty; choose another folder", out.string());
  const HuggingFaceArchitecture& architecture = architecture_of(checkpoint);
  const json& source = checkpoint.manifest().source;
  const std::string dtype = source.is_null() ? "F32" : string_member(source, "dtype", checkpoint.folder().string());
  std::vector<Exported> list = exported_of(checkpoint, dtype);
  check_complete(checkpoint, list);
  const size_t tensors = list.size();
  make_folder(out);
  const std::vector<std::string> files = write_weights(checkpoint, shards_of(std::move(list), shard_bytes), out);
  write_configuration(checkpoint, out, dtype);
  sync_folder(out);
  return {{"folder", out.string()},
          {"architecture", architecture.model_type},
          {"dtype", dtype},
          {"tensors", tensors},
          {"files", files}};
}

}  // namespace optimus
