// The dry backend: the same step without maths. Every call is recorded with the floating-point operations of its
// mathematics and the bytes that its operands have, each read or written once. FLOPs count products only (a
// multiply-add is two); causal attention counts half the square. Tensors of routed rows count the rows that balanced
// experts would have (RouteIndex::balanced_rows): their capacity is larger.
#pragma once

#include <algorithm>
#include <initializer_list>
#include <map>
#include <string_view>
#include <vector>

#include "optimus/ops/cuda/limits.h"
#include "optimus/ops/ops.h"

namespace optimus {

struct OpRecord {
  std::string_view op;
  double flops;
  double bytes;
};

class DryOps final : public Ops {
 public:
  /// Scratch is counted as the kind's kernels would want it.
  explicit DryOps(DeviceKind kind = DeviceKind::cpu, bool deterministic = true)
      : kind_(kind), deterministic_(deterministic) {}
  int64_t fixed_bytes() const override { return kind_ == DeviceKind::cuda ? cuda::kScratchBytes : 0; }
  const std::vector<OpRecord>& records() const { return records_; }
  double total_flops() const;
  void clear() { records_.clear(); }

  void fill(Tensor x, double) override { record("fill", 0, {x}); }
  void copy(Tensor from, Tensor to) override { record("copy", 0, {from, to}); }
  void add(Tensor a, Tensor b, Tensor y) override { record("add", 0, {a, b, y}); }
  void fill_normal(Tensor x, float, const Philox&, uint64_t, int64_t) override { record("fill_normal", 0, {x}); }

  void matmul(Tensor a, Transpose ta, Tensor b, Transpose, Tensor y, Tensor addend) override {
    const double k = double(ta == Transpose::no ? a.columns() : a.rows());
    record("matmul", 2.0 * double(y.elements()) * k, {a, b, y, addend});
  }
  void grouped_matmul(Tensor x, Tensor w, const RouteIndex& index, Tensor y) override {
    record("grouped_matmul", grouped_flops(index, x, y), {touched(w, index)}, row_bytes(index, {x, y}));
  }
  void grouped_matmul_input(Tensor dy, Tensor w, const RouteIndex& index, Tensor dx) override {
    record("grouped_matmul_input", grouped_flops(index, dy, dx), {touched(w, index)}, row_bytes(index, {dy, dx}));
  }
  void grouped_matmul_weight(Tensor dy, Tensor x, const RouteIndex& index, Tensor dw, Write write) override {
    const bool adds = write == Write::accumulate;
    record("grouped_matmul_weight", grouped_flops(index, dy, x),
           {adds ? touched(dw, index) : dw, adds ? touched(dw, index) : Tensor{}}, row_bytes(index, {dy, x}));
  }

  void embedding(Tensor ids, Tensor, Tensor y) override { record("embedding", 0, {ids, y, y}); }
  void embedding_backward(Tensor ids, Tensor dy, Tensor dw, int64_t, Write write) override {
    // Adding reads and writes the rows of at most as many tokens as there are.
    const double rows = std::min<double>(double(ids.elements()), double(dw.rows()));
    record("embedding_backward", 0, {ids, dy, write == Write::overwrite ? dw : Tensor{}},
           write == Write::accumulate ? 2 * bytes_of(dw, rows) : 0.0);
  }

  void norm(NormKind, float, int64_t, Tensor x, Tensor weight, Tensor bias, Tensor addend, Tensor y,
            Tensor statistics) override {
    record("norm", 0, {x, weight, bias, addend, y, statistics});
  }
  void norm_backward(NormKind, int64_t, Tensor x, Tensor weight, Tensor statistics, Tensor dy, Tensor addend, Tensor dx,
                     Tensor dweight, Tensor dbias, Write) override {
    record("norm_backward", 0, {x, weight, statistics, dy, addend, dx, dweight, dbias});
  }

  void rope(Tensor x, Tensor positions, int64_t, float, RopeDirection, Tensor y) override {
    record("rope", 0, {x, positions, y});
  }
  void attention(const AttentionShape& shape, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse) override {
    record("attention", attention_flops(shape), {q, k, v, o, lse});
  }
  void attention_backward(const AttentionShape& shape, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor do_,
                          Tensor dq, Tensor dk, Tensor dv, Tensor) override {
    record("attention_backward", 2.0 * attention_flops(shape), {q, k, v, o, lse, do_, dq, dk, dv});
  }

  int64_t attention_scratch_bytes(const AttentionShape& shape, DType dtype) const override {
    return kind_ == DeviceKind::cuda ? cuda::attention_scratch_bytes(shape, dtype, deterministic_) : 0;
  }
  void swiglu(Tensor h, Tensor, Tensor slots, Tensor rows, Tensor a) override {
    record("swiglu", 0, {}, bytes_of_rows({h, slots, a}, balanced_rows(h, rows)));
  }
  void swiglu_backward(Tensor h, Tensor da, Tensor, Tensor slots, Tensor rows, Tensor dh, Tensor a, Tensor) override {
    record("swiglu_backward", 0, {}, bytes_of_rows({h, da, slots, dh, a}, balanced_rows(h, rows)));
  }

  void router(const RouterShape&, Tensor logits, Tensor, Tensor probs, Tensor gates, Tensor ids, Tensor lse) override {
    record("router", 0, {logits, probs, gates, ids, lse});
  }
  void router_statistics(const RouterShape&, Tensor probs, Tensor ids, Tensor lse, Tensor, Tensor, Tensor) override {
    record("router_statistics", 0, {probs, ids, lse});
  }
  void router_backward(const RouterShape&, Tensor logits, Tensor probs, Tensor gates, Tensor ids, Tensor lse,
                       Tensor dgates, Tensor, float, Tensor dlogits) override {
    record("router_backward", 0, {logits, probs, gates, ids, lse, dgates, dlogits});
  }
  void balance_loss(Tensor counts, Tensor prob_sums, Tensor, double, double, double, Tensor, Tensor gradient) override {
    record("balance_loss", 0, {counts, prob_sums, gradient});
  }

  void route(Tensor ids, int64_t, int64_t, const RouteIndex& index) override {
    routed_rows_[index.offsets_L1.slice(index.offsets_L1.elements() - 1, 1).data] = index.balanced_rows;
    record("route", 0, {ids, index.row_ptr_T1}, row_bytes(index, {index.token_R, index.slot_R, index.row_R}));
  }
  void route_to_ranks(Tensor ids, int64_t, const RouteIndex& index) override {
    record("route_to_ranks", 0, {ids, index.row_ptr_T1}, row_bytes(index, {index.token_R, index.row_R}));
  }
  void gather_rows(Tensor, const RouteIndex& index, Tensor rows) override {
    record("gather_rows", 0, {}, row_bytes(index, {index.token_R, rows, rows}));
  }
  void combine_rows(Tensor rows, const RouteIndex& index, Tensor addend, Tensor y) override {
    const double all = double(y.rows());
    const double tokens = addend.same_view(y) ? std::min(all, index.balanced_rows) : all;  // in place: those with rows
    record("combine_rows", 0, {},
           row_bytes(index, {index.row_R, rows}) + bytes_of(addend, tokens) + bytes_of(y, tokens));
  }

  void cross_entropy(Tensor logits, Tensor, Tensor, float scale, Tensor) override {
    record("cross_entropy", 0, {logits, scale != 0.0f ? logits : Tensor{}});
  }

  void sum_squares(Tensor x, Tensor) override { record("sum_squares", 0, {x}); }
  void clip_control(Tensor, Tensor, float, Tensor) override { record("clip_control", 0, {}); }
  void split_master(Tensor master, Tensor weight, Tensor remainder) override {
    record("split_master", 0, {master, weight, remainder});
  }
  void join_master(Tensor weight, Tensor remainder, Tensor master) override {
    record("join_master", 0, {weight, remainder, master});
  }
  void adamw(const AdamwConstants&, Tensor, Tensor gradient, Tensor master, Tensor m, Tensor v,
             Tensor weight) override {
    const Tensor split = weight.same_view(master) ? Tensor{} : weight;
    record("adamw", 0, {gradient, master, master, m, m, v, v, split, split});
  }

 private:
  static double attention_flops(const AttentionShape& shape) {
    // Two products of queries x keys x head_dim; of the square's last `queries` rows a causal mask keeps
    // keys - queries/2 on average.
    const double seen = shape.causal ? double(shape.keys) - double(shape.queries) / 2.0 : double(shape.keys);
    return 4.0 * double(shape.sequences * shape.heads * shape.head_dim) * double(shape.queries) * seen;
  }
  static double grouped_flops(const RouteIndex& index, const Tensor& a, const Tensor& b) {
    return 2.0 * index.balanced_rows * double(a.columns()) * double(b.columns());
  }
  /// The experts' weights of a product that reads (or adds to) them only where there are rows.
  static Tensor touched(const Tensor& w, const RouteIndex& index) { return index.balanced_rows > 0 ? w : Tensor{}; }
  /// Of `count` entries of the first dimension.
  static double bytes_of(const Tensor& tensor, double count) {
    return tensor && tensor.shape[0] > 0 ? count * double(tensor.bytes() / tensor.shape[0]) : 0.0;
  }
  /// Of the balanced rows of tensors [R] or [R,columns].
  static double row_bytes(const RouteIndex& index, std::initializer_list<Tensor> tensors) {
    return bytes_of_rows(tensors, index.balanced_rows);
  }
  static double bytes_of_rows(std::initializer_list<Tensor> tensors, double rows) {
    double bytes = 0;
    for (const Tensor& tensor : tensors) bytes += bytes_of(tensor, rows);
    return bytes;
  }
  /// Of x, whose number of rows is `rows` (i32 [1], made by route()) or, where that is empty, all of them.
  double balanced_rows(const Tensor& x, const Tensor& rows) const {
    const auto known = rows ? routed_rows_.find(rows.data) : routed_rows_.end();
    return known == routed_rows_.end() ? double(x.rows()) : known->second;
  }
  /// `bytes` come on top of the operands'.
  void record(std::string_view op, double flops, std::initializer_list<Tensor> operands, double bytes = 0) {
    for (const Tensor& operand : operands)
      if (operand) bytes += double(operand.bytes());
    records_.push_back({op, flops, bytes});
  }

  DeviceKind kind_;
  bool deterministic_;
  std::vector<OpRecord> records_;
  std::map<const void*, double> routed_rows_;  ///< balanced_rows by where the number of rows would be
};

}  // namespace optimus
