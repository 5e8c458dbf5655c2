// manifest.json: what a checkpoint holds. It is written last, so a folder without one is no checkpoint.
//
//   {"format_version": 1, "optimus": "0.1.0", "step": 1000, "config": {"model": {...}, ...}, "source": {...},
//    "tensors": {NAME: {"dtype": "f32", "shape": [8, 96, 64],
//                       "slices": [{"begin": [0,0,0], "size": [8,96,64], "file": "weights.safetensors", "name": NAME,
//                                   "checksum": "5f3a..."}]}},
//    "checksum": "..."}
//
// A tensor is described by its global shape, and its slices are boxes of it: whoever wrote them, in whatever layout, any
// box can be put together from them. The last checksum is over the compact text of everything else.
#pragma once

#include <cstdint>
#include <map>
#include <string>
#include <vector>

#include <nlohmann/json.hpp>

#include "optimus/base/file.h"
#include "optimus/model/parameter_table.h"

namespace optimus {

/// A box of a global tensor with its place in the files.
struct Slice {
  Box box;
  std::string file;      ///< in the checkpoint's folder
  std::string name;      ///< in that file
  std::string checksum;  ///< of its bytes
};

struct TensorRecord {
  std::string name;
  DType dtype = DType::f32;
  Shape global;
  std::vector<Slice> slices;
};

struct Manifest {
  static constexpr int64_t kFormatVersion = 1;

  int64_t step = 0;       ///< completed updates
  nlohmann::json config;  ///< the run's sections, each an object; "model" at least
  nlohmann::json source;  ///< where an imported checkpoint came from; null for others
  std::map<std::string, TensorRecord> tensors;

  /// Error(kData) naming the file and the key for anything unexpected, a newer format version first of all.
  static Manifest read(const fs::path& path);
  /// The same from its text; `file` serves messages.
  static Manifest parse(const std::string& text, const std::string& file);
  std::string text() const;
};

/// Whether the name is a parameter's, not that of optimizer or router state.
bool is_parameter(const std::string& tensor);

/// "[begin:end,begin:end]", for messages and for the names of slices.
std::string box_text(const Box& box);
Box whole(const Shape& global);

}  // namespace optimus
