// The one table of parameters. Gradient reduction, the global norm, clipping, sharding, initialisation, checkpoints and
// the Hugging Face names all read these rows and nothing else.
//
// A fused tensor (q, k and v in one matrix; gate and up in one) is one row: names and shapes here are those of our own
// checkpoints. Offsets are counted in elements and are the same in the flat weight and gradient buffers.
//
// The flat buffers are cut into buckets, one a layer and class. A bucket is what is reduced, sharded and gathered at once:
// its length is a multiple of the number of ranks that replicate its class, so that every rank's shard is equally long.
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
  int64_t zero_row = -1;   ///< a row kept at zero (the padding token's embedding)
  int64_t layer = -1;      ///< bucket: layer number; -1 embedding, `layers` final norm and head
  bool tied_copy = false;  ///< the last stage's copy of an embedding that the first stage owns
  int64_t offset = 0;      ///< first element in the flat buffers
  bool matrix() const { return global.rank() >= 2; }
};

using ParameterId = int;

/// All parameters of one layer and class, neighbours in the flat buffers.
struct Bucket {
  int64_t layer = -1;
  ParameterClass cls = ParameterClass::replicated;
  bool tied_copy = false;
  int64_t begin = 0, count = 0;  ///< elements of the flat buffers, padding included
};

/// A run of elements of one row, and where they lie in the flat buffers.
struct RowRange {
  ParameterId id;
  int64_t first, count;  ///< elements of the rank's part of the row, row-major
  int64_t offset;        ///< of the first one in the flat buffers
};

class ParameterTable {
 public:
  static constexpr int64_t kAlignment = 128;      ///< elements: 256 bytes of bf16, 512 of f32
  static constexpr int64_t kShardAlignment = 64;  ///< elements of a rank's shard of a bucket

  /// Adds a row (boxes default to the whole tensor). Names are unique.
  ParameterId add(Parameter parameter);

  /// A matrix (or a stack of them) drawn from N(0, std).
  ParameterId add_normal(std::string name, Shape shape, double std, int64_t layer,
                         ParameterClass cls = ParameterClass::replicated);

  /// After the last add(): gives every row its place. Each class is replicated over that many ranks.
  void lay_out(int64_t replicated_ranks, int64_t expert_ranks);

  const std::vector<Parameter>& rows() const { return rows_; }
  /// In the order of the flat buffers: layers ascending, replicated before expert. Empty before lay_out().
  const std::vector<Bucket>& buckets() const { return buckets_; }
  const Parameter& operator[](ParameterId id) const { return rows_[size_t(id)]; }
  /// The row of that name, or -1.
  ParameterId find(const std::string& name) const;
  /// Length of the flat buffers in elements, padding included.
  int64_t elements() const { return elements_; }
  /// Parameters of the model that these rows describe (global shapes, no padding).
  int64_t count() const;
  int64_t count(ParameterClass cls) const;

  /// The parts of rows in [begin, begin + count) of the flat buffers, ascending.
  std::vector<RowRange> rows_in(int64_t begin, int64_t count) const;

  /// The row's part of a flat buffer.
  Tensor view(Tensor flat, ParameterId id) const;

 private:
  std::vector<Parameter> rows_;
  std::map<std::string, ParameterId> by_name_;
  std::vector<Bucket> buckets_;
  std::vector<ParameterId> by_offset_;
  int64_t elements_ = 0;
};

}  // namespace optimus
