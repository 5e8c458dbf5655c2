// safetensors files: an 8-byte little-endian header length, a JSON header
//   {"__metadata__": {...}, NAME: {"dtype": "F32", "shape": [2, 3], "data_offsets": [begin, end]}, ...}
// and the tensors' bytes, row-major, little-endian, without gaps.
//
// The reader trusts nothing: every length, shape and offset is checked before it is used, so that a damaged file ends
// in Error(kData) naming the file and the tensor. The writer streams: header first, then the bytes in order.
#pragma once

#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "optimus/base/file.h"
#include "optimus/tensor/dtype.h"

namespace optimus {

struct SafetensorsTensor {
  std::string name;
  std::string dtype;  ///< as in the file: "F32", "BF16", ...
  std::vector<int64_t> shape;
  int64_t offset = 0;  ///< first byte, counted from the start of the file
  int64_t bytes = 0;
};

/// Bytes of an element; nothing for a name that the format does not have.
std::optional<int64_t> safetensors_size(std::string_view dtype);
std::string_view safetensors_name(DType dtype);
/// Product of the dimensions; nothing where it leaves [0, 2^63) or a dimension is negative.
std::optional<int64_t> checked_elements(std::span<const int64_t> shape);

class SafetensorsReader {
 public:
  explicit SafetensorsReader(const fs::path& path);

  const fs::path& path() const { return file_.path(); }
  /// In the order of their bytes.
  const std::vector<SafetensorsTensor>& tensors() const { return tensors_; }
  /// Null when the file has no such tensor.
  const SafetensorsTensor* find(const std::string& name) const;
  /// The tensor's bytes in the mapped file; valid as long as the reader. Not aligned to the element.
  std::span<const std::byte> bytes(const SafetensorsTensor& tensor) const;

 private:
  MappedFile file_;
  std::vector<SafetensorsTensor> tensors_;
  std::map<std::string, size_t> by_name_;
};

class SafetensorsWriter {
 public:
  /// Writes the header for `tensors` (name, dtype and shape are read; names are unique). The same list gives the same
  /// bytes; the data section starts at a multiple of 8.
  SafetensorsWriter(const fs::path& path, const std::vector<SafetensorsTensor>& tensors);
  /// The next bytes of the data: the tensors in the order of the list, cut anywhere.
  void write(std::span<const std::byte> bytes);
  /// Flushes to the disk. Fewer bytes than the header promises are a bug.
  void close();

 private:
  OutputFile file_;
  int64_t remaining_ = 0;
};

}  // namespace optimus
