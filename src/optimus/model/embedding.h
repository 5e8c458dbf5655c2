// Token embedding:  x[t] = w[token[t]].  T tokens, D hidden, V vocabulary.
#pragma once

#include "optimus/model/config.h"
#include "optimus/model/context.h"

namespace optimus {

class Embedding {
 public:
  Embedding(const ModelConfig& model, ParameterTable& table)
      : padding_token_(model.padding_token), tied_(model.tie_embeddings) {
    Parameter row;
    row.name = "embedding.weight";
    row.global = {model.vocab, model.hidden};
    row.init_std = model.init_std;
    row.zero_row = model.padding_token;
    weight_ = table.add(row);
  }

  ParameterId weight() const { return weight_; }

  void forward(Context& c, Tensor tokens_T, Tensor x_TD) const { c.ops.embedding(tokens_T, c.weight(weight_), x_TD); }

  /// The padding token gets no gradient. A tied head has written to the same gradient before.
  void backward_weight(Context& c, Tensor tokens_T, Tensor dx_TD) const {
    c.ops.embedding_backward(tokens_T, dx_TD, c.gradient(weight_), padding_token_, tied_ ? Write::accumulate : c.write);
  }

 private:
  int64_t padding_token_;
  bool tied_;
  ParameterId weight_;
};

}  // namespace optimus
