#include "optimus/checkpoint/import.h"

#include <cstring>
#include <set>

#include "optimus/base/json.h"
#include "optimus/checkpoint/convert.h"
#include "optimus/checkpoint/hugging_face_config.h"
#include "optimus/checkpoint/writer.h"

namespace optimus {
namespace {

using nlohmann::json;

struct SourceTensor {
  const SafetensorsReader* file;
  const SafetensorsTensor* tensor;
  std::span<const std::byte> bytes() const { return file->bytes(*tensor); }
  std::string where() const { return fmt::format("{}: tensor {}", file->path().string(), tensor->name); }
};

/// All tensors of a folder, whatever its number of files.
class SourceFolder {
 public:
  explicit SourceFolder(const fs::path& folder) {
    for (const fs::path& path : files_of(folder)) readers_.push_back(std::make_unique<SafetensorsReader>(path));
    for (const auto& reader : readers_) {
      for (const SafetensorsTensor& tensor : reader->tensors()) {
        const auto [at, added] = tensors_.try_emplace(tensor.name, SourceTensor{reader.get(), &tensor});
        require(added, ErrorKind::kData, "{}: tensor {} is also in {}", reader->path().string(), tensor.name,
                at->second.file->path().string());
      }
    }
  }

  const std::map<std::string, SourceTensor>& tensors() const { return tensors_; }

 private:
  static std::set<fs::path> files_of(const fs::path& folder) {
    std::set<fs::path> files;
    const fs::path index = folder / "model.safetensors.index.json";
    if (fs::exists(index)) {
      const json root = parse_json(read_text(index), index.string());
      const json& map = member_of(root, "weight_map", index.string());
      require(map.is_object(), ErrorKind::kData, "{}: weight_map is not an object", index.string());
      for (const auto& [tensor, file] : map.items())
        files.insert(folder / fs::path(string_member(map, tensor, index.string())).filename());
    } else {
      for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
        const std::string name = entry.path().filename().string();
        if (name.starts_with("model") && name.ends_with(".safetensors")) files.insert(entry.path());
      }
    }
    require(!files.empty(), ErrorKind::kData, "{} holds no model*.safetensors", folder.string());
    return files;
  }

  std::vector<std::unique_ptr<SafetensorsReader>> readers_;
  std::map<std::string, SourceTensor> tensors_;
};

/// A table of names only fits a folder with that many tensors; a damaged configuration must not make it grow.
void check_size(const ModelConfig& model, ExpertNames names, size_t tensors, const std::string& config_file) {
  int64_t expected = model.layers;
  if (model.moe && names == ExpertNames::kSeparate && model.moe_layers() > 0)
    expected = std::max(expected, 3 * model.moe->experts);
  require(expected <= int64_t(tensors), ErrorKind::kData,
          "{}: a model of {} layers{} does not fit a folder of {} tensors", config_file, model.layers,
          model.moe ? fmt::format(" and {} experts", model.moe->experts) : "", tensors);
}

bool has_shape(const SafetensorsTensor& tensor, const Shape& shape) {
  bool same = tensor.shape.size() == size_t(shape.rank());
  for (int i = 0; same && i < shape.rank(); ++i) same = tensor.shape[size_t(i)] == shape[i];
  return same;
}

/// Source tensors that hold no parameters: tables that older versions saved.
bool is_ignorable(const std::string& name) { return name.ends_with("rotary_emb.inv_freq"); }

/// A tied head may be stored a second time; it must then be the embedding, bit for bit.
bool is_tied_head(const SourceTensor& source, const ModelConfig& model, const SourceFolder& folder) {
  if (!model.tie_embeddings || source.tensor->name != "lm_head.weight") return false;
  const auto embedding = folder.tensors().find("model.embed_tokens.weight");
  const bool same = embedding != folder.tensors().end() && embedding->second.tensor->dtype == source.tensor->dtype &&
                    std::ranges::equal(embedding->second.bytes(), source.bytes());
  require(same, ErrorKind::kData, "{}: differs from model.embed_tokens.weight although tie_word_embeddings is true",
          source.where());
  return true;
}

struct Piece {
  int64_t first;  ///< index of the source's first element in our parameter
  int64_t elements;
  SourceTensor source;
};

struct Plan {
  std::vector<TensorPart> parts;                     ///< our parameters, whole, f32
  std::map<std::string, std::vector<Piece>> pieces;  ///< by parameter, in order, without gaps
  std::map<std::string, int64_t> dtypes;             ///< number of source tensors of each
};

Plan plan_of(const SourceFolder& folder, const std::vector<HuggingFaceTensor>& table, const ModelConfig& model,
             const fs::path& where) {
  Plan plan;
  std::set<std::string> used;
  for (const HuggingFaceTensor& row : table) {
    const auto found = folder.tensors().find(row.name);
    require(found != folder.tensors().end(), ErrorKind::kData, "{}: the tensor {} is missing (it fills {} {})",
            where.string(), row.name, row.parameter, box_text(row.box));
    const SourceTensor& source = found->second;
    require(has_shape(*source.tensor, row.shape), ErrorKind::kData, "{}: has another shape than {}", source.where(),
            row.shape.text());
    require(is_weight_type(source.tensor->dtype), ErrorKind::kData, "{}: {} is not supported, only F32, BF16 and F16",
            source.where(), source.tensor->dtype);
    used.insert(row.name);
    ++plan.dtypes[source.tensor->dtype];
    auto [at, is_new] = plan.pieces.try_emplace(row.parameter);
    if (is_new) plan.parts.push_back({row.parameter, DType::f32, row.parameter_shape, whole(row.parameter_shape)});
    at->second.push_back({row.first_element(), row.shape.elements(), source});
  }
  for (const auto& [name, source] : folder.tensors())
    require(used.contains(name) || is_ignorable(name) || is_tied_head(source, model, folder), ErrorKind::kData,
            "{}: no parameter of the model takes it", source.where());
  for (const TensorPart& part : plan.parts) {
    std::vector<Piece>& pieces = plan.pieces[part.name];
    std::sort(pieces.begin(), pieces.end(), [](const Piece& a, const Piece& b) { return a.first < b.first; });
    int64_t end = 0;
    for (const Piece& piece : pieces) {
      expects(piece.first == end, "parameter {}: the table of names leaves element {} unset", part.name, end);
      end += piece.elements;
    }
    expects(end == part.global.elements(), "parameter {}: the table of names ends at element {}", part.name, end);
  }
  return plan;
}

/// Elements [first, first + out.size()) of a parameter, widened from the pieces they lie in.
void fill_from(const std::vector<Piece>& pieces, int64_t first, std::span<float> out) {
  auto piece = std::upper_bound(pieces.begin(), pieces.end(), first,
                                [](int64_t index, const Piece& candidate) { return index < candidate.first; });
  for (--piece; !out.empty(); ++piece) {
    const int64_t skipped = first - piece->first;
    const size_t count = std::min(size_t(piece->elements - skipped), out.size());
    const std::string& dtype = piece->source.tensor->dtype;
    widen(dtype, piece->source.bytes().data() + skipped * *safetensors_size(dtype), out.first(count));
    out = out.subspan(count);
    first += int64_t(count);
  }
}

/// The most frequent type, and by name the tensors of another, so that an export gives back the same bits.
json source_of(const Plan& plan, const HuggingFaceArchitecture& architecture, ExpertNames names,
               const std::string& config_text) {
  std::string dtype = "F32";
  int64_t most = 0;
  for (const auto& [name, count] : plan.dtypes)
    if (count > most) most = count, dtype = name;
  json others = json::object();
  for (const auto& [parameter, pieces] : plan.pieces)
    for (const Piece& piece : pieces)
      if (piece.source.tensor->dtype != dtype) others[piece.source.tensor->name] = piece.source.tensor->dtype;
  return {{"architecture", architecture.model_type},
          {"dtype", dtype},
          {"experts", names == ExpertNames::kFused ? "fused" : "separate"},
          {"other_dtypes", std::move(others)},
          {"config", config_text}};
}

void copy_passed_through(const fs::path& folder, const fs::path& to) {
  make_folder(to);
  for (const fs::directory_entry& entry : fs::directory_iterator(folder)) {
    const std::string name = entry.path().filename().string();
    const bool wanted = name == "config.json" || name == "generation_config.json" ||
                        name == "special_tokens_map.json" || name == "added_tokens.json" || name == "vocab.json" ||
                        name == "merges.txt" || name == "chat_template.jinja" || name.starts_with("tokenizer");
    if (wanted && entry.is_regular_file()) copy_file_durably(entry.path(), to / name);
  }
  sync_folder(to);
}

/// An earlier import may be replaced, nothing else.
void check_free(const fs::path& out) {
  std::error_code ignored;
  if (!fs::exists(out, ignored) || (fs::is_directory(out, ignored) && fs::is_empty(out, ignored))) return;
  const bool imported = fs::exists(out / "manifest.json", ignored) && fs::exists(out / "hf" / "config.json", ignored);
  require(imported, ErrorKind::kUsage, "--out {} exists and is no imported checkpoint; choose another folder",
          out.string());
}

}  // namespace

json import_hugging_face(const fs::path& folder, const fs::path& out) {
  require(fs::is_directory(folder), ErrorKind::kData, "{} is not a folder", folder.string());
  check_free(out);
  const fs::path config_file = folder / "config.json";
  const std::string config_text = read_text(config_file);
  const HuggingFaceModel read =
      read_hugging_face_config(parse_json(config_text, config_file.string()), config_file.string());
  const SourceFolder source(folder);
  const bool fused = std::ranges::any_of(
      source.tensors(), [](const auto& entry) { return entry.first.ends_with(".experts.gate_up_proj"); });
  const ExpertNames names = fused ? ExpertNames::kFused : ExpertNames::kSeparate;
  check_size(read.model, names, source.tensors().size(), config_file.string());
  const Plan plan = plan_of(source, hugging_face_tensors(read.model, *read.architecture, names), read.model, folder);

  CheckpointWriter writer(out, 0);
  writer.write("weights.safetensors", plan.parts,
               [&](const TensorPart& part, int64_t first, std::span<std::byte> bytes) {
                 const std::span floats(reinterpret_cast<float*>(bytes.data()), bytes.size() / sizeof(float));
                 fill_from(plan.pieces.at(part.name), first, floats);
               });
  copy_passed_through(folder, writer.partial_folder() / "hf");
  json details = source_of(plan, *read.architecture, names, config_text);
  const std::string dtype = details["dtype"];
  writer.commit({{"model", section_to_json(read.model)}}, std::move(details));

  int64_t parameters = 0;
  for (const TensorPart& part : plan.parts) parameters += part.global.elements();
  return {{"checkpoint", out.string()},
          {"architecture", read.architecture->model_type},
          {"dtype", dtype},
          {"tensors", plan.parts.size()},
          {"parameters", parameters}};
}

}  // namespace optimus
