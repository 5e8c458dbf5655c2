// Normalisation with its parameters: RMSNorm, LayerNorm with weight and bias, LayerNorm without (OLMo).
#pragma once

#include "optimus/model/config.h"
#include "optimus/model/context.h"

namespace optimus {

class Norm {
 public:
  /// The model's own kind over rows of `hidden` elements.
  Norm(const ModelConfig& model, ParameterTable& table, const std::string& name, int64_t layer);
  /// An RMSNorm over `groups` vectors of `width` elements in each row (QK-norm: one weight for all groups).
  Norm(double eps, int64_t groups, int64_t width, ParameterTable& table, const std::string& name, int64_t layer);

  Shape statistics_shape(int64_t tokens) const { return {tokens, groups_ * 2}; }

  /// y = norm(x) + addend.
  void forward(Context& c, Tensor x, Tensor addend, Tensor y, Tensor statistics) const {
    c.ops.norm(kind_, float(eps_), groups_, x, c.weight(weight_), c.weight(bias_), addend, y, statistics);
  }
  /// dx = gradient + addend, and the gradients of weight and bias (vectors: not worth a pass of their own).
  void backward(Context& c, Tensor x, Tensor statistics, Tensor dy, Tensor addend, Tensor dx) const {
    c.ops.norm_backward(kind_, groups_, x, c.weight(weight_), statistics, dy, addend, dx, c.gradient(weight_),
                        c.gradient(bias_), c.write);
  }

 private:
  NormKind kind_;
  double eps_;
  int64_t groups_;
  ParameterId weight_ = -1, bias_ = -1;
};

}  // namespace optimus
