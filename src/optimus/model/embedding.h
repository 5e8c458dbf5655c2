// Token embedding:  x[t] = w[token[t]].  T tokens, D hidden, V vocabulary.
#pragma once

#include "optimus/model/config.h"
#include "optimus/model/context.h"

namespace optimus {

/// The row "embedding.weight": the embedding's own, or (`tied_copy`) that of a tied head on another stage.
inline ParameterId add_embedding_weight(const ModelConfig& model, ParameterTable& table, bool tied_copy) {
  Parameter row;
  row.name = "embedding.weight";
  row.global = {model.vocab, model.hidden};
  row.init_std = model.init_std;
  row.zero_row = model.padding_token;
  row.tied_copy = tied_copy;
  return table.add(row);
}

class Embedding {
 public:
  /// `weight` is the table's row; see add_embedding_weight. `head_writes_first`: a tied head on this stage.
  Embedding(const ModelConfig& model, ParameterId weight, bool head_writes_first)
      : padding_token_(model.padding_token), head_writes_first_(head_writes_first), weight_(weight) {}

  void forward(Context& c, Tensor tokens_T, Tensor x_TD) const { c.ops.embedding(tokens_T, c.weight(weight_), x_TD); }

  /// The padding token gets no gradient.
  void backward_weight(Context& c, Tensor tokens_T, Tensor dx_TD) const {
    c.ops.embedding_backward(tokens_T, dx_TD, c.gradient(weight_), padding_token_,
                             head_writes_first_ ? Write::accumulate : c.write);
  }

 private:
  int64_t padding_token_;
  bool head_writes_first_;
  ParameterId weight_;
};

}  // namespace optimus
