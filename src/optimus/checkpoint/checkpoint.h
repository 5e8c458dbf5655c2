// A checkpoint being read. Any box of any tensor is put together from the slices that overlap it, whichever layout wrote
// them; every slice is checked against its checksum before the first byte of it is used. Files are mapped, never loaded
// whole.
#pragma once

#include <functional>
#include <map>
#include <set>
#include <span>
#include <string>
#include <vector>

#include "optimus/checkpoint/manifest.h"
#include "optimus/checkpoint/safetensors.h"
#include "optimus/model/config.h"

namespace optimus {

/// A box of a global tensor as the caller holds it: contiguous, row-major, of `dtype`.
struct TensorPart {
  std::string name;
  DType dtype = DType::f32;
  Shape global;
  Box box;
  int64_t offset = 0;  ///< first element in the caller's buffer; not used here
};

/// A run of elements of the flat buffers as boxes of tensors: of a tensor that is cut, the rest of its first row, whole
/// rows, and the beginning of its last. `offset` is where the run's first element lies in the caller's buffer; `prefix` +
/// the parameter's name is the tensor's.
std::vector<TensorPart> parts_of(const ParameterTable& table, const std::string& prefix, DType dtype, int64_t begin,
                                 int64_t count, int64_t offset);

struct Damage {
  std::string file, tensor, message;
};

class Checkpoint {
 public:
  /// Reads the manifest of a checkpoint's folder, no tensors. Error(kData).
  explicit Checkpoint(const fs::path& folder);

  const fs::path& folder() const { return folder_; }
  const Manifest& manifest() const { return manifest_; }
  int64_t step() const { return manifest_.step; }
  bool has(const std::string& tensor) const { return manifest_.tensors.contains(tensor); }

  /// Fills `out` (the part's elements times size) with the part, f32 and bf16 converted into each other as needed.
  /// Error(kData) naming the tensor: unknown, of another global shape, an element that no slice holds, damaged.
  void read(const TensorPart& part, std::span<std::byte> out);

  /// Takes elements [first, first + bytes/size) of a part.
  using Receive = std::function<void(const TensorPart& part, int64_t first, std::span<const std::byte> bytes)>;
  /// Reads the parts one after the other through a host buffer of bounded size.
  void load(const std::vector<TensorPart>& parts, const Receive& receive);

  enum class Check {
    kStructure,  ///< files, names, types, shapes, and that no element is missing
    kContents,   ///< and every checksum
  };
  /// Everything that is wrong, each damaged slice once. Reads every file with kContents.
  std::vector<Damage> damages(Check check);

 private:
  const TensorRecord& record(const std::string& tensor) const;
  const SafetensorsReader& open(const std::string& file);
  /// The slice's bytes; Error when file, name, type or shape do not match the manifest.
  std::span<const std::byte> located(const TensorRecord& record, const Slice& slice);
  std::span<const std::byte> verified(const TensorRecord& record, const Slice& slice);

  fs::path folder_;
  Manifest manifest_;
  std::map<std::string, SafetensorsReader> files_;
  std::set<const Slice*> verified_;
};

/// The model section of the checkpoint's configuration; Error(kData) when it does not hold one.
ModelConfig model_config_of(const Checkpoint& checkpoint);

}  // namespace optimus
