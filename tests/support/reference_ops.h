// The forward kernels of ops.h in double, on the reference functions: the product's own Model runs over them, which gives
// the whole model's loss to about 1e-9 for central differences. The router's choice can be recorded and held fixed.
#pragma once

#include "support/reference.h"

namespace optimus::test {

/// Only what a forward pass calls; the rest throws.
class ReferenceOps final : public Ops {
 public:
  /// While set, router() takes the recorded choices, in the order of the calls.
  void hold_routing(bool hold) { hold_ = hold, call_ = 0; }

  void fill(Tensor x, double value) override { put(x, Values(size_t(x.elements()), value)); }
  void copy(Tensor from, Tensor to) override { put(to, get(from)); }
  void add(Tensor a, Tensor b, Tensor y) override { put(y, reference::sum(get(a), get(b))); }
  void matmul(Tensor a, Transpose ta, Tensor b, Transpose tb, Tensor y, Tensor addend) override;
  void grouped_matmul(Tensor x, Tensor w, const RouteIndex& index, Tensor y) override;
  void embedding(Tensor ids, Tensor w, Tensor y) override;
  void norm(NormKind kind, float eps, int64_t groups, Tensor x, Tensor weight, Tensor bias, Tensor addend, Tensor y,
            Tensor statistics) override;
  void rope(Tensor x, Tensor positions, int64_t heads, float theta, RopeDirection direction, Tensor y) override;
  void attention(const AttentionShape& shape, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse) override;
  void swiglu(Tensor h, Tensor gates, Tensor slots, Tensor rows, Tensor a) override;
  void router(const RouterShape& shape, Tensor logits, Tensor bias, Tensor probs, Tensor gates, Tensor ids,
              Tensor lse) override;
  void router_statistics(const RouterShape& shape, Tensor probs, Tensor ids, Tensor lse, Tensor counts,
                         Tensor prob_sums, Tensor z_sum) override;
  void balance_loss(Tensor counts, Tensor prob_sums, Tensor fixed_f, double tokens, double scale, double gradient_scale,
                    Tensor loss, Tensor gradient) override;
  void route(Tensor ids, int64_t first_expert, int64_t first_row, const RouteIndex& index) override;
  void route_to_ranks(Tensor ids, int64_t experts_per_rank, const RouteIndex& index) override;
  void gather_rows(Tensor x, const RouteIndex& index, Tensor rows) override;
  void combine_rows(Tensor rows, const RouteIndex& index, Tensor addend, Tensor y) override;
  void cross_entropy(Tensor logits, Tensor targets, Tensor weights, float scale, Tensor loss) override;

  void fill_normal(Tensor, float, const Philox&, uint64_t, int64_t) override { unused(); }
  void grouped_matmul_input(Tensor, Tensor, const RouteIndex&, Tensor) override { unused(); }
  void grouped_matmul_weight(Tensor, Tensor, const RouteIndex&, Tensor, Write) override { unused(); }
  void embedding_backward(Tensor, Tensor, Tensor, int64_t, Write) override { unused(); }
  void norm_backward(NormKind, int64_t, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
                     Write) override {
    unused();
  }
  void attention_backward(const AttentionShape&, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor,
                          Tensor) override {
    unused();
  }
  int64_t attention_scratch_bytes(const AttentionShape&, DType) const override { return 0; }
  void swiglu_backward(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor) override { unused(); }
  void split_master(Tensor, Tensor, Tensor) override { unused(); }
  void join_master(Tensor, Tensor, Tensor) override { unused(); }
  void router_backward(const RouterShape&, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, float,
                       Tensor) override {
    unused();
  }
  void sum_squares(Tensor, Tensor) override { unused(); }
  void clip_control(Tensor, Tensor, float, Tensor) override { unused(); }
  void adamw(const AdamwConstants&, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor) override { unused(); }

  static Values get(Tensor tensor);
  static Indices get_indices(Tensor tensor);
  static void put(Tensor tensor, const Values& values);

 private:
  /// As far as the reference's gather and combine read it.
  static reference::Route get_route(const RouteIndex& index);
  static void put_route(const RouteIndex& index, const reference::Route& route);
  [[noreturn]] static void unused() { throw std::logic_error("the reference runs forward only"); }
  static Values plus(Values values, Tensor addend) {
    return addend ? reference::sum(values, get(addend)) : std::move(values);
  }

  bool hold_ = false;
  size_t call_ = 0;
  std::vector<Indices> choices_;
};

}  // namespace optimus::test
