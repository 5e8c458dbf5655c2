// y = x * w^T + addend, and its two gradients. Weights are [out, in], as everywhere in the field.
#pragma once

#include "optimus/model/context.h"

namespace optimus {

inline void linear(Context& c, Tensor x_TK, ParameterId w_NK, Tensor addend_TN, Tensor y_TN) {
  c.ops.matmul(x_TK, Transpose::no, c.weight(w_NK), Transpose::yes, y_TN, addend_TN);
}
inline void linear_backward_input(Context& c, Tensor dy_TN, ParameterId w_NK, Tensor addend_TK, Tensor dx_TK) {
  c.ops.matmul(dy_TN, Transpose::no, c.weight(w_NK), Transpose::no, dx_TK, addend_TK);
}
inline void linear_backward_weight(Context& c, Tensor dy_TN, Tensor x_TK, ParameterId w_NK) {
  c.ops.matmul(dy_TN, Transpose::yes, x_TK, Transpose::no, c.gradient(w_NK), c.gradient_addend(w_NK));
}

}  // namespace optimus
