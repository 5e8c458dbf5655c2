#include "optimus/checkpoint/checkpoint.h"

#include <optional>

#include "optimus/base/json.h"
#include "optimus/checkpoint/checksum.h"
#include "optimus/checkpoint/convert.h"

namespace optimus {
namespace {

constexpr int64_t kBufferBytes = 32 << 20;

std::optional<Box> intersection(const Box& a, const Box& b) {
  Box common = a;
  for (int i = 0; i < a.size.rank(); ++i) {
    const int64_t begin = std::max(a.begin[i], b.begin[i]);
    const int64_t end = std::min(a.begin[i] + a.size[i], b.begin[i] + b.size[i]);
    if (begin >= end) return std::nullopt;
    common.begin[i] = begin;
    common.size[i] = end - begin;
  }
  return common;
}

/// Elements [first, first + count) of a contiguous box, row-major, as boxes in their order: along the first dimension
/// that the run crosses, what is left of a row, whole rows, and the beginning of another.
std::vector<Box> boxes_of_run(const Box& box, int64_t first, int64_t count) {
  std::vector<Box> pieces;
  const int rank = box.size.rank();
  const auto cut = [&](auto&& self, Box within, int dimension, int64_t begin, int64_t end) -> void {
    if (begin >= end) return;
    int64_t row = 1;  // elements of an entry of `dimension`
    for (int i = dimension + 1; i < rank; ++i) row *= box.size[i];
    const auto entries = [&](int64_t from, int64_t to) {
      Box part = within;
      part.begin[dimension] += from;
      part.size[dimension] = to - from;
      return part;
    };
    const int64_t whole_begin = (begin + row - 1) / row, whole_end = end / row;
    if (whole_begin > whole_end) {  // inside one row
      self(self, entries(whole_end, whole_end + 1), dimension + 1, begin - whole_end * row, end - whole_end * row);
      return;
    }
    if (begin < whole_begin * row)
      self(self, entries(whole_begin - 1, whole_begin), dimension + 1, begin - (whole_begin - 1) * row, row);
    if (whole_begin < whole_end) pieces.push_back(entries(whole_begin, whole_end));
    if (whole_end * row < end) self(self, entries(whole_end, whole_end + 1), dimension + 1, 0, end - whole_end * row);
  };
  if (rank == 0) return {box};
  cut(cut, box, 0, first, first + count);
  return pieces;
}

struct Piece {
  const Slice* slice;
  Box box;
};

/// The slices' parts of `box`, proven to cover it exactly once: disjoint, and as many elements as the box.
std::vector<Piece> pieces_of(const TensorRecord& record, const Box& box, const fs::path& folder) {
  std::vector<Piece> pieces;
  if (box.size.elements() == 0) return pieces;
  int64_t covered = 0;
  for (const Slice& slice : record.slices) {
    const std::optional<Box> common = intersection(slice.box, box);
    if (!common) continue;
    covered += common->size.elements();
    pieces.push_back({&slice, *common});
  }
  // Overlaps are looked for among pieces that share an entry of the first dimension: few, however many slices there are.
  if (box.size.rank() > 0) {
    std::stable_sort(pieces.begin(), pieces.end(),
                     [](const Piece& a, const Piece& b) { return a.box.begin[0] < b.box.begin[0]; });
    for (size_t i = 0; i < pieces.size(); ++i)
      for (size_t j = i + 1; j < pieces.size(); ++j) {
        if (pieces[j].box.begin[0] >= pieces[i].box.begin[0] + pieces[i].box.size[0]) break;
        require(!intersection(pieces[i].box, pieces[j].box), ErrorKind::kData, "{}: tensor {}: slices overlap at {}",
                folder.string(), record.name, box_text(pieces[j].box));
      }
  }
  require(covered == box.size.elements(), ErrorKind::kData,
          "{}: tensor {}: {} of the {} elements of {} are in no slice", folder.string(), record.name,
          box.size.elements() - covered, box.size.elements(), box_text(box));
  return pieces;
}

/// Index of an element of the global tensor inside a contiguous box.
int64_t index_in(const Box& box, const Shape& element) {
  int64_t index = 0;
  for (int i = 0; i < element.rank(); ++i) index = index * box.size[i] + element[i] - box.begin[i];
  return index;
}

/// Copies `common` from one contiguous box to another, one run along the last dimension at a time.
void copy_box(const Box& common, DType from_type, const Box& from_box, const std::byte* from, DType to_type,
              const Box& to_box, std::byte* to) {
  const int rank = common.size.rank();
  const int64_t run = rank == 0 ? 1 : common.size[rank - 1];
  Shape at = common.begin;
  for (int64_t left = common.size.elements() / run; left > 0; --left) {
    convert(from_type, from + index_in(from_box, at) * size_of(from_type), to_type,
            to + index_in(to_box, at) * size_of(to_type), run);
    for (int i = rank - 2; i >= 0; --i) {
      if (++at[i] < common.begin[i] + common.size[i]) break;
      at[i] = common.begin[i];
    }
  }
}

/// Whether the slice's tensor in the file is what the manifest says.
bool matches(const SafetensorsTensor& tensor, const TensorRecord& record, const Slice& slice) {
  bool same = tensor.dtype == safetensors_name(record.dtype) && tensor.shape.size() == size_t(slice.box.size.rank());
  for (int i = 0; same && i < slice.box.size.rank(); ++i) same = tensor.shape[size_t(i)] == slice.box.size[i];
  return same;
}

}  // namespace

std::vector<TensorPart> parts_of(const ParameterTable& table, const std::string& prefix, DType dtype, int64_t begin,
                                 int64_t count, int64_t offset) {
  std::vector<TensorPart> parts;
  for (const RowRange& range : table.rows_in(begin, count)) {
    const Parameter& row = table[range.id];
    int64_t box_first = 0, at = offset + range.offset - begin;
    for (const Box& box : row.boxes) {
      const int64_t elements = box.size.elements();
      const int64_t first = std::max(range.first, box_first);
      const int64_t last = std::min(range.first + range.count, box_first + elements);
      if (first < last)
        for (const Box& piece : boxes_of_run(box, first - box_first, last - first)) {
          parts.push_back({prefix + row.name, dtype, row.global, piece, at});
          at += piece.size.elements();
        }
      box_first += elements;
    }
  }
  return parts;
}

Checkpoint::Checkpoint(const fs::path& folder) : folder_(folder), manifest_(Manifest::read(folder / "manifest.json")) {}

const TensorRecord& Checkpoint::record(const std::string& tensor) const {
  const auto found = manifest_.tensors.find(tensor);
  require(found != manifest_.tensors.end(), ErrorKind::kData, "{}: there is no tensor {}", folder_.string(), tensor);
  return found->second;
}

const SafetensorsReader& Checkpoint::open(const std::string& file) {
  const auto found = files_.find(file);
  if (found != files_.end()) return found->second;
  return files_.emplace(file, SafetensorsReader(folder_ / file)).first->second;
}

std::span<const std::byte> Checkpoint::located(const TensorRecord& record, const Slice& slice) {
  const SafetensorsReader& file = open(slice.file);
  const SafetensorsTensor* tensor = file.find(slice.name);
  require(tensor, ErrorKind::kData, "{}: tensor {} is missing", file.path().string(), slice.name);
  require(matches(*tensor, record, slice), ErrorKind::kData,
          "{}: tensor {} has another type or shape than the manifest's {} {}", file.path().string(), slice.name,
          name_of(record.dtype), slice.box.size.text());
  return file.bytes(*tensor);
}

std::span<const std::byte> Checkpoint::verified(const TensorRecord& record, const Slice& slice) {
  const std::span<const std::byte> bytes = located(record, slice);
  if (verified_.contains(&slice)) return bytes;
  const std::string checksum = checksum_of(bytes);
  require(checksum == slice.checksum, ErrorKind::kData, "{}: tensor {} is damaged: its checksum is {}, expected {}",
          (folder_ / slice.file).string(), slice.name, checksum, slice.checksum);
  verified_.insert(&slice);
  return bytes;
}

void Checkpoint::read(const TensorPart& part, std::span<std::byte> out) {
  const TensorRecord& stored = record(part.name);
  require(stored.global == part.global, ErrorKind::kData, "{}: tensor {} has the shape {}, expected {}",
          folder_.string(), part.name, stored.global.text(), part.global.text());
  require(convertible(stored.dtype, part.dtype), ErrorKind::kData, "{}: tensor {} is {}, expected {}", folder_.string(),
          part.name, name_of(stored.dtype), name_of(part.dtype));
  expects(int64_t(out.size()) == part.box.size.elements() * size_of(part.dtype),
          "tensor {}: a buffer of {} bytes for {}", part.name, out.size(), box_text(part.box));
  for (const Piece& piece : pieces_of(stored, part.box, folder_))
    copy_box(piece.box, stored.dtype, piece.slice->box, verified(stored, *piece.slice).data(), part.dtype, part.box,
             out.data());
}

void Checkpoint::load(const std::vector<TensorPart>& parts, const Receive& receive) {
  std::vector<std::byte> buffer;
  for (const TensorPart& part : parts) {
    const int64_t rows = part.box.size.rank() == 0 ? 1 : part.box.size[0];
    if (part.box.size.elements() == 0) continue;
    const int64_t row_elements = part.box.size.elements() / rows;
    const int64_t rows_at_once = std::max<int64_t>(1, kBufferBytes / (row_elements * size_of(part.dtype)));
    for (int64_t row = 0; row < rows; row += rows_at_once) {
      TensorPart chunk = part;
      if (chunk.box.size.rank() > 0) {
        chunk.box.begin[0] += row;
        chunk.box.size[0] = std::min(rows_at_once, rows - row);
      }
      buffer.resize(size_t(chunk.box.size.elements() * size_of(part.dtype)));
      read(chunk, buffer);
      receive(part, row * row_elements, buffer);
    }
  }
}

std::vector<Damage> Checkpoint::damages(Check check) {
  std::vector<Damage> found;
  for (const auto& entry : manifest_.tensors) {
    const TensorRecord& record = entry.second;
    const auto note_failure = [&](const std::string& file, const auto& action) {
      try {
        action();
      } catch (const Error& error) {
        found.push_back({file, record.name, error.what()});
      }
    };
    note_failure("manifest.json", [&] { pieces_of(record, whole(record.global), folder_); });
    for (const Slice& slice : record.slices)
      note_failure(slice.file, [&] { check == Check::kContents ? verified(record, slice) : located(record, slice); });
  }
  return found;
}

ModelConfig model_config_of(const Checkpoint& checkpoint) {
  const std::string where = (checkpoint.folder() / "manifest.json").string();
  try {
    return section_from_json<ModelConfig>(member_of(checkpoint.manifest().config, "model", where), where, "model");
  } catch (const Error& error) {
    throw Error(ErrorKind::kData, error.what());
  }
}

}  // namespace optimus
