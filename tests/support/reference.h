// Every kernel of ops.h once more: plain, slow, in double, on dense row-major vectors, and sharing nothing with the
// product. Kernels must match these within their type's tolerance; central differences of the forward functions check
// the kernels' gradients. Shape letters are those of ops.h.
#pragma once

#include <functional>

#include "optimus/ops/ops.h"
#include "support/host_tensor.h"

namespace optimus::reference {

using test::Indices;
using test::Values;

// ---- products ----
/// op(a) [m,k] * op(b) [k,n].
Values matmul(const Values& a, Transpose ta, const Values& b, Transpose tb, int64_t m, int64_t n, int64_t k);
/// Of offsets.back() rows.
Values grouped_matmul(const Values& x, const Values& w, const Indices& offsets, int64_t n, int64_t k);
Values grouped_matmul_input(const Values& dy, const Values& w, const Indices& offsets, int64_t n, int64_t k);
Values grouped_matmul_weight(const Values& dy, const Values& x, const Indices& offsets, int64_t n, int64_t k);

// ---- embedding ----
Values embedding(const Indices& ids, const Values& w, int64_t hidden);
Values embedding_backward(const Indices& ids, const Values& dy, int64_t vocabulary, int64_t hidden,
                          int64_t padding_token);

// ---- normalisation; empty weight or bias = none ----
struct NormShape {
  NormKind kind;
  double eps;
  int64_t groups, width;  ///< a row holds `groups` vectors of `width`
};
struct NormResult {
  Values y, statistics;
};
struct NormGradients {
  Values dx, dweight, dbias;
};
NormResult norm(const NormShape& shape, const Values& x, const Values& weight, const Values& bias);
NormGradients norm_backward(const NormShape& shape, const Values& x, const Values& weight, const Values& dy);

// ---- attention ----
struct AttentionResult {
  Values o, lse;
};
struct AttentionGradients {
  Values dq, dk, dv;
};
Values rope(const Values& x, const Indices& positions, int64_t heads, double theta, RopeDirection direction);
AttentionResult attention(const AttentionShape& shape, const Values& q, const Values& k, const Values& v);
AttentionGradients attention_backward(const AttentionShape& shape, const Values& q, const Values& k, const Values& v,
                                      const Values& do_);

// ---- gated MLP; gate_R holds a gate for each row ----
struct SwigluGradients {
  Values dh, dgate_R;
};
Values swiglu(const Values& h, const Values& gate_R, int64_t width);
/// Of sum(a * da).
SwigluGradients swiglu_backward(const Values& h, const Values& da, const Values& gate_R, int64_t width);

// ---- router ----
struct RouterResult {
  Values probs, gates, lse;
};
/// The chosen experts [T,K].
Indices router_choice(const RouterShape& shape, const Values& logits, const Values& bias, int64_t experts);
/// Probabilities, gates of the given choice, log-sum-exp.
RouterResult router(const RouterShape& shape, const Values& logits, const Indices& ids, int64_t experts);
Values router_backward(const RouterShape& shape, const Values& logits, const Indices& ids, const Values& dgates,
                       const Values& balance, double z_scale, int64_t experts);

// ---- dispatch ----
struct Route {
  Indices offsets, token, slot, row_ptr, row;
};
/// All rows.
Route route(const Indices& ids, int64_t top_k, int64_t first_expert, int64_t local_experts);
/// The rows [first_row, first_row + capacity) of them, counted from first_row.
Route wave(const Route& all, int64_t first_row, int64_t capacity);
/// No slots; a token's rows are in the order in which its experts first name their ranks.
Route route_to_ranks(const Indices& ids, int64_t top_k, int64_t experts_per_rank, int64_t ranks);
Values gather_rows(const Values& x, const Route& route, int64_t hidden);
Values combine_rows(const Values& rows, const Route& route, int64_t hidden);

// ---- loss ----
struct CrossEntropyResult {
  double loss;
  Values gradient;  ///< of the loss by the logits
};
CrossEntropyResult cross_entropy(const Values& logits, const Indices& targets, const Values& weights);

// ---- optimizer ----
struct AdamwState {
  Values master, m, v;
};
struct AdamwStep {
  double learning_rate, correction1, correction2, clip;
};
void adamw(const AdamwConstants& constants, const AdamwStep& step, const Values& gradient, AdamwState& state);

// ---- helpers ----
double dot(const Values& a, const Values& b);
Values sum(const Values& a, const Values& b);
/// The gradient of f at x by central differences of fourth order; exact to about 1e-10 for the sizes used here.
Values numeric_gradient(const std::function<double(const Values&)>& f, Values x);

}  // namespace optimus::reference
