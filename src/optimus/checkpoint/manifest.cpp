#include "optimus/checkpoint/manifest.h"

#include <limits>

#include "optimus/base/json.h"
#include "optimus/base/version.h"
#include "optimus/checkpoint/checksum.h"
#include "optimus/checkpoint/safetensors.h"

namespace optimus {
namespace {

using nlohmann::json;

json to_json(const Shape& shape) {
  json array = json::array();
  for (int i = 0; i < shape.rank(); ++i) array.push_back(shape[i]);
  return array;
}

Shape shape_from(const json& value, const std::string& where) {
  const std::vector<int64_t> dims = naturals_of(value, where);
  require(dims.size() <= size_t(Shape::kMaxRank), ErrorKind::kData, "{}: {} dimensions, at most {} are supported",
          where, dims.size(), Shape::kMaxRank);
  switch (dims.size()) {
    case 0: return {};
    case 1: return {dims[0]};
    case 2: return {dims[0], dims[1]};
    case 3: return {dims[0], dims[1], dims[2]};
    default: return {dims[0], dims[1], dims[2], dims[3]};
  }
}

DType dtype_from(const std::string& name, const std::string& where) {
  for (const DType dtype : {DType::f32, DType::bf16, DType::f64, DType::i32, DType::i64})
    if (name_of(dtype) == name) return dtype;
  fail(ErrorKind::kData, "{}: unknown dtype \"{}\"", where, name);
}

/// A file beside the manifest, never one outside its folder.
bool is_plain_file_name(const std::string& name) {
  return !name.empty() && name.front() != '.' && name.find('/') == std::string::npos &&
         name.find('\0') == std::string::npos;
}

Slice slice_from(const json& value, const Shape& global, const std::string& where) {
  Slice slice;
  slice.box = {shape_from(member_of(value, "begin", where), where + ": begin"),
               shape_from(member_of(value, "size", where), where + ": size")};
  slice.file = string_member(value, "file", where);
  slice.name = string_member(value, "name", where);
  slice.checksum = string_member(value, "checksum", where);
  require(is_plain_file_name(slice.file), ErrorKind::kData, "{}: \"{}\" is not a file name", where, slice.file);
  bool inside = slice.box.begin.rank() == global.rank() && slice.box.size.rank() == global.rank();
  for (int i = 0; inside && i < global.rank(); ++i)
    inside = slice.box.begin[i] <= global[i] && slice.box.size[i] <= global[i] - slice.box.begin[i];
  require(inside, ErrorKind::kData, "{}: the slice {} + {} lies outside the shape {}", where, slice.box.begin.text(),
          slice.box.size.text(), global.text());
  return slice;
}

TensorRecord record_from(const std::string& name, const json& value, const std::string& file) {
  const std::string where = fmt::format("{}: tensor {}", file, name);
  TensorRecord record;
  record.name = name;
  record.dtype = dtype_from(string_member(value, "dtype", where), where);
  const json& shape = member_of(value, "shape", where);
  const std::optional<int64_t> elements = checked_elements(naturals_of(shape, where));
  require(elements && *elements <= std::numeric_limits<int64_t>::max() / size_of(record.dtype), ErrorKind::kData,
          "{}: the shape is too large", where);
  record.global = shape_from(shape, where);
  const json& slices = member_of(value, "slices", where);
  require(slices.is_array(), ErrorKind::kData, "{}: \"slices\" is {}, expected an array", where, slices.type_name());
  for (const json& slice : slices) record.slices.push_back(slice_from(slice, record.global, where));
  return record;
}

json record_to(const TensorRecord& record) {
  json slices = json::array();
  for (const Slice& slice : record.slices)
    slices.push_back({{"begin", to_json(slice.box.begin)},
                      {"size", to_json(slice.box.size)},
                      {"file", slice.file},
                      {"name", slice.name},
                      {"checksum", slice.checksum}});
  return {{"dtype", name_of(record.dtype)}, {"shape", to_json(record.global)}, {"slices", std::move(slices)}};
}

std::string checksum_of_text(const std::string& text) {
  return checksum_of(std::as_bytes(std::span(text.data(), text.size())));
}

}  // namespace

Manifest Manifest::read(const fs::path& path) { return parse(read_text(path), path.string()); }

Manifest Manifest::parse(const std::string& text, const std::string& file) {
  json root = parse_json(text, file);
  const int64_t version = natural_of(member_of(root, "format_version", file), file + ": format_version");
  require(version <= kFormatVersion, ErrorKind::kData,
          "{}: format version {} is newer than {}, the newest that optimus {} reads; use the version that wrote it",
          file, version, kFormatVersion, kVersion);
  require(version >= 1, ErrorKind::kData, "{}: format version {} does not exist", file, version);
  const std::string checksum = string_member(root, "checksum", file);
  root.erase("checksum");
  require(checksum_of_text(root.dump()) == checksum, ErrorKind::kData,
          "{}: the text does not match its checksum {}; the manifest is damaged or was edited", file, checksum);

  Manifest manifest;
  manifest.step = natural_of(member_of(root, "step", file), file + ": step");
  const json& tensors = member_of(root, "tensors", file);
  require(tensors.is_object(), ErrorKind::kData, "{}: \"tensors\" is {}, expected an object", file,
          tensors.type_name());
  for (const auto& [name, value] : tensors.items()) manifest.tensors.emplace(name, record_from(name, value, file));
  manifest.config = member_of(root, "config", file);
  require(manifest.config.is_object(), ErrorKind::kData, "{}: \"config\" is {}, expected an object", file,
          manifest.config.type_name());
  if (root.contains("source")) manifest.source = root["source"];
  return manifest;
}

std::string Manifest::text() const {
  json root = {{"format_version", kFormatVersion}, {"optimus", kVersion}, {"step", step}, {"config", config}};
  if (!source.is_null()) root["source"] = source;
  json& records = root["tensors"] = json::object();
  for (const auto& [name, record] : tensors) records[name] = record_to(record);
  root["checksum"] = checksum_of_text(root.dump());
  return root.dump(1) + "\n";
}

bool is_parameter(const std::string& tensor) {
  for (const std::string_view prefix : {"embedding.", "layers.", "final_norm.", "head."})
    if (tensor.starts_with(prefix)) return true;
  return false;
}

std::string box_text(const Box& box) {
  std::string text = "[";
  for (int i = 0; i < box.size.rank(); ++i)
    text += fmt::format("{}{}:{}", i ? "," : "", box.begin[i], box.begin[i] + box.size[i]);
  return text + "]";
}

Box whole(const Shape& global) {
  Box box{global, global};
  for (int i = 0; i < global.rank(); ++i) box.begin[i] = 0;
  return box;
}

}  // namespace optimus
