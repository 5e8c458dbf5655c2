#include "optimus/model/head.h"

#include "optimus/model/linear.h"

namespace optimus {

Head::Head(const ModelConfig& model, ParameterTable& table, ParameterId tied)
    : vocab_(model.vocab),
      norm_(model, table, "final_norm", model.layers),
      weight_(tied >= 0 ? tied
                        : table.add_normal("head.weight", {model.vocab, model.hidden}, model.init_std, model.layers)) {}

// Enough rows for efficient products (each chunk reads and writes the weight's gradient once more, which a GPU feels),
// few enough that a large vocabulary's logits stay small.
int64_t Head::chunk_tokens(const Context& c, int64_t tokens) const {
  constexpr int64_t kLogits = int64_t(1) << 23;
  const int64_t rows = c.dtype == DType::bf16 ? 4096 : 1024;
  return std::min(tokens, std::max(rows, kLogits / vocab_ / 128 * 128));
}

void Head::forward_backward(Context& c, const MicroBatch& batch, Tensor x_TD, const LossScales& scales,
                            const LossSums& sums, Tensor dx_TD) const {
  const int64_t T = x_TD.rows(), chunk = chunk_tokens(c, T);
  Arena::Scope scope(c.workspace);
  const Tensor statistics = c.temporary(DType::f32, norm_.statistics_shape(T));
  const Tensor n_TD = c.temporary(c.dtype, x_TD.shape);
  const Tensor logits = c.temporary(c.dtype, {chunk, vocab_});
  norm_.forward(c, x_TD, {}, n_TD, statistics);
  for (int64_t first = 0; first < T; first += chunk) {
    const int64_t C = std::min(chunk, T - first);
    const Tensor n_CD = n_TD.slice(first, C), logits_CV = logits.slice(0, C);
    linear(c, n_CD, weight_, {}, logits_CV);
    c.ops.cross_entropy(logits_CV, batch.targets_T.slice(first, C), batch.weights_T.slice(first, C),
                        float(1.0 / scales.target_weight), sums.cross_entropy);
    linear_backward_input(c, logits_CV, weight_, {}, dx_TD.slice(first, C));
    c.ops.matmul(logits_CV, Transpose::yes, n_CD, Transpose::no, c.gradient(weight_),
                 first > 0 ? c.gradient(weight_) : c.gradient_addend(weight_));
  }
  norm_.backward(c, x_TD, statistics, dx_TD, {}, dx_TD);
}

void Head::forward(Context& c, const MicroBatch& batch, Tensor x_TD, const LossSums& sums,
                   const LogitsSink& sink) const {
  const int64_t T = x_TD.rows(), chunk = chunk_tokens(c, T);
  Arena::Scope scope(c.workspace);
  const Tensor statistics = c.temporary(DType::f32, norm_.statistics_shape(T));
  const Tensor n_TD = c.temporary(c.dtype, x_TD.shape);
  const Tensor logits = c.temporary(c.dtype, {chunk, vocab_});
  norm_.forward(c, x_TD, {}, n_TD, statistics);
  for (int64_t first = 0; first < T; first += chunk) {
    const int64_t C = std::min(chunk, T - first);
    const Tensor logits_CV = logits.slice(0, C);
    linear(c, n_TD.slice(first, C), weight_, {}, logits_CV);
    if (sink) sink(first, logits_CV);
    if (batch.targets_T)
      c.ops.cross_entropy(logits_CV, batch.targets_T.slice(first, C), batch.weights_T.slice(first, C), 0.0f,
                          sums.cross_entropy);
  }
}

}  // namespace optimus
