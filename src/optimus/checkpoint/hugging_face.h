// Our parameters under the names of Hugging Face transformers: one table of rows, made from the model's configuration,
// that import, export and gradients read. A Hugging Face tensor is a box of one of our (fused) parameters, and always a
// contiguous one: q, k and v are row ranges of qkv, gate and up of gate_up, an expert's matrix is a range of rows of the
// stack of all experts.
#pragma once

#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "optimus/model/config.h"
#include "optimus/model/parameter_table.h"

namespace optimus {

/// What distinguishes the architectures that can be exchanged: the model keys they fix, the defaults of their
/// config.json, and how they name an expert's matrices.
struct HuggingFaceArchitecture {
  std::string_view model_type;  ///< "olmoe", as in config.json
  std::string_view class_name;  ///< "OlmoeForCausalLM"
  std::string_view norm, norm_position, qk_norm;
  bool moe;
  double norm_eps, rope_theta;  ///< when config.json does not say
  int64_t padding_token;        ///< likewise
  std::string_view moe_block;   ///< "mlp" or "block_sparse_moe"
  std::string_view gate, up, down;
};

std::span<const HuggingFaceArchitecture> hugging_face_architectures();
/// Null when the name is not known.
const HuggingFaceArchitecture* find_architecture(std::string_view model_type);
/// The architecture that expresses the model; Error(kUsage) naming the key that none has.
const HuggingFaceArchitecture& architecture_for(const ModelConfig& model);

struct HuggingFaceTensor {
  std::string name;
  Shape shape;
  std::string parameter;  ///< ours
  Shape parameter_shape;
  Box box;  ///< of our parameter; as many elements as `shape`, contiguous
  /// Index in the parameter of the tensor's first element.
  int64_t first_element() const;
};

/// How the experts of a layer are stored: one tensor each in files, all in one in the memory of transformers 5.
enum class ExpertNames { kSeparate, kFused };

/// Every tensor of the model; their boxes cover every one of our parameters exactly once.
std::vector<HuggingFaceTensor> hugging_face_tensors(const ModelConfig& model,
                                                    const HuggingFaceArchitecture& architecture,
                                                    ExpertNames experts = ExpertNames::kSeparate);

}  // namespace optimus
