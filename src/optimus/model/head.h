// Final norm, output projection and cross-entropy, fused in chunks of tokens so that the logits of a whole micro-batch
// never exist:
//
//   logits = norm(x) W^T;   loss = sum_t weight_t * (logsumexp(logits_t) - logits_t[target_t]) / total weight
//
// In training the gradient follows at once, chunk by chunk, while the chunk's logits are there: so this layer's backward
// (weight gradient included) is part of its forward.  T tokens, D hidden, V vocabulary, C tokens of a chunk.
#pragma once

#include <functional>

#include "optimus/model/norm.h"

namespace optimus {

/// Receives the logits [C,V] of the rows from `first_token` on; they are valid during the call.
using LogitsSink = std::function<void(int64_t first_token, Tensor logits_CV)>;

class Head {
 public:
  /// `tied`: the embedding's weight, or -1 for a weight of its own.
  Head(const ModelConfig& model, ParameterTable& table, ParameterId tied);

  /// Adds to sums.cross_entropy; dx = d loss / d x, and the parameters' gradients.
  void forward_backward(Context& c, const MicroBatch& batch, Tensor x_TD, const LossScales& scales,
                        const LossSums& sums, Tensor dx_TD) const;
  /// Adds to sums.cross_entropy only.
  void forward(Context& c, const MicroBatch& batch, Tensor x_TD, const LossSums& sums, const LogitsSink& sink) const;

 private:
  int64_t chunk_tokens(const Context& c, int64_t tokens) const;

  int64_t vocab_;
  Norm norm_;
  ParameterId weight_;
};

}  // namespace optimus
