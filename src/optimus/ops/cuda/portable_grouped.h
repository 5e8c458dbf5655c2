// Grouped products for every GPU from sm_80 on, any widths and alignments, f32 (without TF32) and bf16. One launch
// each. For CUDA sources only.
#pragma once

#include <cuda_runtime_api.h>

#include "optimus/ops/ops.h"

namespace optimus::cuda {

/// y[r] = x[r] * op(w[e(r)]): Transpose::yes is Ops::grouped_matmul, Transpose::no is Ops::grouped_matmul_input. Rows
/// past the last offset are left untouched; y's rows bound the offsets.
void portable_grouped_rows(cudaStream_t stream, const Tensor& x, const Tensor& w_LNK, Transpose tw,
                           const Tensor& offsets_L1, const Tensor& y);

/// See Ops::grouped_matmul_weight.
void portable_grouped_weight(cudaStream_t stream, const Tensor& dy_RN, const Tensor& x_RK, const Tensor& offsets_L1,
                             const Tensor& dw_LNK, Write write);

}  // namespace optimus::cuda
