// What the router's kernels share: its formulas, the sigmoid.
//
// Scores s are softmax(logits) or sigmoid(logits); probs are s, divided by their sum for the sigmoid. With n the sum of
// the chosen scores where gates are normalised (plus 1e-20 for the sigmoid), else 1: gate_k = score_scale s_k / n.
// Backward, with d_k = dgates_k score_scale:
//   ds_k = (d_k - [normalised] sum_j d_j s_j / n) / n                        at the chosen experts
//   softmax: dlogit = s (ds + balance - sum_e s (ds + balance))
//   sigmoid: dlogit = s (1 - s) (ds + (balance - sum_e probs balance) / sum_e s)
// and both add 2 z_scale lse softmax(logits).
#pragma once

#include "optimus/ops/cuda/kernels.cuh"

namespace optimus::cuda {

constexpr int kRouterThreads = 128;  // of blocks whose warps have a token each
constexpr int64_t kRouterSharedBytes = 48 << 10;

/// The division is good to 2 units in the last place.
__device__ inline float sigmoid(float x) { return __fdividef(1.0f, 1.0f + expf(-x)); }

}  // namespace optimus::cuda
