#include "optimus/checkpoint/safetensors.h"

#include <cstring>
#include <limits>
#include <set>

#include <fmt/ranges.h>

#include "optimus/base/json.h"

namespace optimus {
namespace {

using nlohmann::json;

constexpr int64_t kLengthBytes = 8;
constexpr int64_t kAlignment = 8;
constexpr uint64_t kMaxHeaderBytes = 100'000'000;  // the limit of the format's own library

SafetensorsTensor read_entry(const std::string& name, const json& entry, const std::string& file, int64_t data_start,
                             int64_t data_bytes) {
  const std::string where = fmt::format("{}: tensor {}", file, name);
  SafetensorsTensor tensor;
  tensor.name = name;
  tensor.dtype = string_member(entry, "dtype", where);
  tensor.shape = naturals_of(member_of(entry, "shape", where), where + ": shape");
  const std::vector<int64_t> offsets = naturals_of(member_of(entry, "data_offsets", where), where + ": data_offsets");

  const std::optional<int64_t> size = safetensors_size(tensor.dtype);
  require(size.has_value(), ErrorKind::kData, "{}: unknown dtype \"{}\"", where, tensor.dtype);
  const std::optional<int64_t> elements = checked_elements(tensor.shape);
  require(elements && *elements <= std::numeric_limits<int64_t>::max() / *size, ErrorKind::kData,
          "{}: the shape [{}] is too large", where, fmt::join(tensor.shape, ","));
  require(offsets.size() == 2 && offsets[0] <= offsets[1], ErrorKind::kData,
          "{}: data_offsets [{}] are not [begin, end]", where, fmt::join(offsets, ","));
  require(offsets[1] <= data_bytes, ErrorKind::kData,
          "{}: ends at byte {} of the data, but the file holds {} (truncated?)", where, offsets[1], data_bytes);
  require(offsets[1] - offsets[0] == *elements * *size, ErrorKind::kData,
          "{}: {} bytes for the shape [{}] of {}, expected {}", where, offsets[1] - offsets[0],
          fmt::join(tensor.shape, ","), tensor.dtype, *elements * *size);
  tensor.offset = data_start + offsets[0];
  tensor.bytes = offsets[1] - offsets[0];
  return tensor;
}

}  // namespace

std::optional<int64_t> safetensors_size(std::string_view dtype) {
  for (const std::string_view name : {"F64", "I64", "U64", "C64"})
    if (dtype == name) return 8;
  for (const std::string_view name : {"F32", "I32", "U32"})
    if (dtype == name) return 4;
  for (const std::string_view name : {"F16", "BF16", "I16", "U16"})
    if (dtype == name) return 2;
  for (const std::string_view name : {"I8", "U8", "BOOL", "F8_E4M3", "F8_E5M2", "F8_E8M0"})
    if (dtype == name) return 1;
  return std::nullopt;
}

std::string_view safetensors_name(DType dtype) {
  switch (dtype) {
    case DType::f32: return "F32";
    case DType::bf16: return "BF16";
    case DType::f64: return "F64";
    case DType::i16: return "I16";
    case DType::i32: return "I32";
    case DType::i64: return "I64";
  }
  return "?";
}

std::optional<int64_t> checked_elements(std::span<const int64_t> shape) {
  int64_t elements = 1;
  for (const int64_t dim : shape)
    if (dim < 0 || __builtin_mul_overflow(elements, dim, &elements)) return std::nullopt;
  return elements;
}

SafetensorsReader::SafetensorsReader(const fs::path& path) : file_(path) {
  const std::string name = path.string();
  require(file_.size() >= kLengthBytes, ErrorKind::kData, "{}: {} bytes are too few for a safetensors file", name,
          file_.size());
  uint64_t header_bytes = 0;
  std::memcpy(&header_bytes, file_.data(), sizeof(header_bytes));
  require(header_bytes <= std::min(kMaxHeaderBytes, uint64_t(file_.size() - kLengthBytes)), ErrorKind::kData,
          "{}: the header claims {} bytes of a file of {} (truncated, or not a safetensors file)", name, header_bytes,
          file_.size());
  const int64_t data_start = kLengthBytes + int64_t(header_bytes);
  const int64_t data_bytes = file_.size() - data_start;
  const std::string_view text(reinterpret_cast<const char*>(file_.data()) + kLengthBytes, size_t(header_bytes));
  const json header = parse_json(text, name + ": header");
  require(header.is_object(), ErrorKind::kData, "{}: the header is {}, expected an object", name, header.type_name());
  for (const auto& [key, entry] : header.items())
    if (key != "__metadata__") tensors_.push_back(read_entry(key, entry, name, data_start, data_bytes));

  std::sort(tensors_.begin(), tensors_.end(), [](const SafetensorsTensor& a, const SafetensorsTensor& b) {
    return std::pair(a.offset, a.bytes) < std::pair(b.offset, b.bytes);
  });
  int64_t end = data_start;
  for (size_t i = 0; i < tensors_.size(); ++i) {
    require(tensors_[i].offset == end, ErrorKind::kData, "{}: tensor {} {} the bytes before it", name, tensors_[i].name,
            tensors_[i].offset < end ? "overlaps" : "leaves a gap to");
    end += tensors_[i].bytes;
    by_name_.emplace(tensors_[i].name, i);
  }
  require(end == file_.size(), ErrorKind::kData, "{}: {} bytes follow the last tensor", name, file_.size() - end);
}

const SafetensorsTensor* SafetensorsReader::find(const std::string& name) const {
  const auto found = by_name_.find(name);
  return found == by_name_.end() ? nullptr : &tensors_[found->second];
}

std::span<const std::byte> SafetensorsReader::bytes(const SafetensorsTensor& tensor) const {
  return file_.bytes().subspan(size_t(tensor.offset), size_t(tensor.bytes));
}

SafetensorsWriter::SafetensorsWriter(const fs::path& path, const std::vector<SafetensorsTensor>& tensors)
    : file_(path) {
  std::string text = R"({"__metadata__":{"format":"pt"})";  // transformers refuses files without it
  std::set<std::string_view> names;
  for (const SafetensorsTensor& tensor : tensors) {
    const std::optional<int64_t> size = safetensors_size(tensor.dtype), elements = checked_elements(tensor.shape);
    expects(size && elements && names.insert(tensor.name).second, "safetensors: tensor {} {} [{}] cannot be written",
            tensor.name, tensor.dtype, fmt::join(tensor.shape, ","));
    const int64_t end = remaining_ + *size * *elements;
    text += fmt::format(R"(,{}:{{"dtype":"{}","shape":[{}],"data_offsets":[{},{}]}})", json(tensor.name).dump(),
                        tensor.dtype, fmt::join(tensor.shape, ","), remaining_, end);
    remaining_ = end;
  }
  text += "}";
  text.resize((text.size() + kAlignment - 1) / kAlignment * kAlignment, ' ');
  const uint64_t header_bytes = text.size();
  file_.write(&header_bytes, sizeof(header_bytes));
  file_.write(text);
}

void SafetensorsWriter::write(std::span<const std::byte> bytes) {
  remaining_ -= int64_t(bytes.size());
  expects(remaining_ >= 0, "safetensors: {} bytes more than the header promises", -remaining_);
  file_.write(bytes.data(), bytes.size());
}

void SafetensorsWriter::close() {
  expects(remaining_ == 0, "safetensors: {} bytes fewer than the header promises", remaining_);
  file_.close();
}

}  // namespace optimus
