// The one table of parameters. Gradient reduction, the global norm, clipping, sharding, initialisation, checkpoints and
// the Hugging Face names all read these rows and nothing else.
//
// A fused tensor (q, k and v in one matrix; gate and up in one) is one row: names and shapes here are those of our own
// checkpoints. Offsets are counted in elements and are the same in the flat weight, gradient and optimizer buffers.
#pragma once

#include <map>
#include <string>
#include <vector>

#include "optimus/tensor/tensor.h"

namespace optimus {

enum class ParameterClass : uint8_t {
  replicated,  ///< every rank of a data-parallel group holds it all
  expert,      ///< sharded over the expert-parallel group on its first dimension
};

enum class Init : uint8_t { normal, ones, zeros };

/// A box of the global tensor: [begin, begin + size) in each dimension.
struct Box {
  Shape begin;
  Shape size;
};

struct Parameter {
  std::string name;        ///< "layers.3.attention.qkv.weight"; global, the same in every layout
  Shape global;            ///< shape in the model
  std::vector<Box> boxes;  ///< what this rank holds, stacked along the first dimension
  Shape local;             ///< shape of that
  ParameterClass cls = ParameterClass::replicated;
  Init init = Init::normal;
  double init_std = 0.0;
  int64_t zero_row = -1;  ///< a row kept at zero (the padding token's embedding)
  int64_t layer = -1;     ///< bucket: layer number; -1 embedding, `layers` final norm and head
  int64_t offset = 0;     ///< first element in the flat buffers
  bool matrix() const { return global.rank() >= 2; }
};

using ParameterId = int;

class ParameterTable {
 public:
  static constexpr int64_t kAlignment = 128;  ///< elements: 256 bytes of bf16, 512 of f32

  /// Adds a row (boxes default to the whole tensor) and lays it out. Names are unique.
  ParameterId add(Parameter parameter);

  /// A matrix (or a stack of them) drawn from N(0, std).
  ParameterId add_normal(std::string name, Shape shape, double std, int64_t layer,
                         ParameterClass cls = ParameterClass::replicated);

  const std::vector<Parameter>& rows() const { return rows_; }
  const Parameter& operator[](ParameterId id) const { return rows_[size_t(id)]; }
  /// The row of that name, or -1.
  ParameterId find(const std::string& name) const;
  /// Length of the flat buffers in elements, padding included.
  int64_t elements() const { return elements_; }
  /// Parameters of the model that these rows describe (global shapes, no padding).
  int64_t count() const;
  int64_t count(ParameterClass cls) const;

  /// The row's part of a flat buffer.
  Tensor view(Tensor flat, ParameterId id) const;

 private:
  std::vector<Parameter> rows_;
  std::map<std::string, ParameterId> by_name_;
  int64_t elements_ = 0;
};

}  // namespace optimus
