// Ops that take the time of each call on another backend, and its FLOPs and bytes from the dry one: the profile of a real
// step, op by op. Calls are waited for, so a device that works ahead of the host is slower under it.
#pragma once

#include <chrono>
#include <map>
#include <string>

#include "optimus/ops/dry/dry_ops.h"

namespace optimus {

struct OpTotals {
  int64_t calls = 0;
  double seconds = 0, flops = 0, bytes = 0;
};

class TimedOps : public Ops {
 public:
  /// `device` is waited for before and after each call.
  TimedOps(std::unique_ptr<Ops> inner, Device& device) : inner_(std::move(inner)), device_(device) {}

  const std::map<std::string, OpTotals>& totals() const { return totals_; }
  void clear() { totals_.clear(); }

  std::string choices() const override { return inner_->choices(); }
  bool set_choices(const std::string& text) override { return inner_->set_choices(text); }
  void start_tuning_wait() override { inner_->start_tuning_wait(); }
  int64_t fixed_bytes() const override { return inner_->fixed_bytes(); }

  void fill(Tensor x, double value) override {
    time([&](Ops& ops) { ops.fill(x, value); });
  }
  void copy(Tensor from, Tensor to) override {
    time([&](Ops& ops) { ops.copy(from, to); });
  }
  void add(Tensor a, Tensor b, Tensor y) override {
    time([&](Ops& ops) { ops.add(a, b, y); });
  }
  void fill_normal(Tensor x, float std, const Philox& generator, uint64_t stream, int64_t first) override {
    time([&](Ops& ops) { ops.fill_normal(x, std, generator, stream, first); });
  }
  void matmul(Tensor a, Transpose ta, Tensor b, Transpose tb, Tensor y, Tensor addend) override {
    time([&](Ops& ops) { ops.matmul(a, ta, b, tb, y, addend); });
  }
  void grouped_matmul(Tensor x, Tensor w, const RouteIndex& index, Tensor y) override {
    time([&](Ops& ops) { ops.grouped_matmul(x, w, index, y); });
  }
  void grouped_matmul_input(Tensor dy, Tensor w, const RouteIndex& index, Tensor dx) override {
    time([&](Ops& ops) { ops.grouped_matmul_input(dy, w, index, dx); });
  }
  void grouped_matmul_weight(Tensor dy, Tensor x, const RouteIndex& index, Tensor dw, Write write) override {
    time([&](Ops& ops) { ops.grouped_matmul_weight(dy, x, index, dw, write); });
  }
  void embedding(Tensor ids, Tensor w, Tensor y) override {
    time([&](Ops& ops) { ops.embedding(ids, w, y); });
  }
  void embedding_backward(Tensor ids, Tensor dy, Tensor dw, int64_t padding, Write write) override {
    time([&](Ops& ops) { ops.embedding_backward(ids, dy, dw, padding, write); });
  }
  void norm(NormKind kind, float eps, int64_t groups, Tensor x, Tensor weight, Tensor bias, Tensor addend, Tensor y,
            Tensor statistics) override {
    time([&](Ops& ops) { ops.norm(kind, eps, groups, x, weight, bias, addend, y, statistics); });
  }
  void norm_backward(NormKind kind, int64_t groups, Tensor x, Tensor weight, Tensor statistics, Tensor dy,
                     Tensor addend, Tensor dx, Tensor dweight, Tensor dbias, Write write) override {
    time([&](Ops& ops) {
      ops.norm_backward(kind, groups, x, weight, statistics, dy, addend, dx, dweight, dbias, write);
    });
  }
  void rope(Tensor x, Tensor positions, int64_t heads, float theta, RopeDirection direction, Tensor y) override {
    time([&](Ops& ops) { ops.rope(x, positions, heads, theta, direction, y); });
  }
  void attention(const AttentionShape& shape, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse) override {
    time([&](Ops& ops) { ops.attention(shape, q, k, v, o, lse); });
  }
  void attention_backward(const AttentionShape& shape, Tensor q, Tensor k, Tensor v, Tensor o, Tensor lse, Tensor do_,
                          Tensor dq, Tensor dk, Tensor dv, Tensor scratch) override {
    time([&](Ops& ops) { ops.attention_backward(shape, q, k, v, o, lse, do_, dq, dk, dv, scratch); });
  }
  int64_t attention_scratch_bytes(const AttentionShape& shape, DType dtype) const override {
    return inner_->attention_scratch_bytes(shape, dtype);
  }
  void swiglu(Tensor h, Tensor gates, Tensor slots, Tensor rows, Tensor a) override {
    time([&](Ops& ops) { ops.swiglu(h, gates, slots, rows, a); });
  }
  void swiglu_backward(Tensor h, Tensor da, Tensor gates, Tensor slots, Tensor rows, Tensor dh, Tensor a,
                       Tensor dgates) override {
    time([&](Ops& ops) { ops.swiglu_backward(h, da, gates, slots, rows, dh, a, dgates); });
  }
  void router(const RouterShape& shape, Tensor logits, Tensor bias, Tensor probs, Tensor gates, Tensor ids,
              Tensor lse) override {
    time([&](Ops& ops) { ops.router(shape, logits, bias, probs, gates, ids, lse); });
  }
  void router_statistics(const RouterShape& shape, Tensor probs, Tensor ids, Tensor lse, Tensor counts,
                         Tensor prob_sums, Tensor z_sum) override {
    time([&](Ops& ops) { ops.router_statistics(shape, probs, ids, lse, counts, prob_sums, z_sum); });
  }
  void router_backward(const RouterShape& shape, Tensor logits, Tensor probs, Tensor gates, Tensor ids, Tensor lse,
                       Tensor dgates, Tensor balance, float z_scale, Tensor dlogits) override {
    time([&](Ops& ops) {
      ops.router_backward(shape, logits, probs, gates, ids, lse, dgates, balance, z_scale, dlogits);
    });
  }
  void balance_loss(Tensor counts, Tensor prob_sums, Tensor fixed_f, double tokens, double scale, double gradient_scale,
                    Tensor loss, Tensor gradient) override {
    time(
        [&](Ops& ops) { ops.balance_loss(counts, prob_sums, fixed_f, tokens, scale, gradient_scale, loss, gradient); });
  }
  void route(Tensor ids, int64_t first_expert, int64_t first_row, const RouteIndex& index) override {
    time([&](Ops& ops) { ops.route(ids, first_expert, first_row, index); });
  }
  void route_to_ranks(Tensor ids, int64_t experts_per_rank, const RouteIndex& index) override {
    time([&](Ops& ops) { ops.route_to_ranks(ids, experts_per_rank, index); });
  }
  void gather_rows(Tensor x, const RouteIndex& index, Tensor rows) override {
    time([&](Ops& ops) { ops.gather_rows(x, index, rows); });
  }
  void combine_rows(Tensor rows, const RouteIndex& index, Tensor addend, Tensor y) override {
    time([&](Ops& ops) { ops.combine_rows(rows, index, addend, y); });
  }
  void cross_entropy(Tensor logits, Tensor targets, Tensor weights, float scale, Tensor loss) override {
    time([&](Ops& ops) { ops.cross_entropy(logits, targets, weights, scale, loss); });
  }
  void sum_squares(Tensor x, Tensor out) override {
    time([&](Ops& ops) { ops.sum_squares(x, out); });
  }
  void clip_control(Tensor squares, Tensor loss, float clip_norm, Tensor control) override {
    time([&](Ops& ops) { ops.clip_control(squares, loss, clip_norm, control); });
  }
  void split_master(Tensor master, Tensor weight, Tensor remainder) override {
    time([&](Ops& ops) { ops.split_master(master, weight, remainder); });
  }
  void join_master(Tensor weight, Tensor remainder, Tensor master) override {
    time([&](Ops& ops) { ops.join_master(weight, remainder, master); });
  }
  void adamw(const AdamwConstants& constants, Tensor control, Tensor gradient, Tensor master, Tensor m, Tensor v,
             Tensor weight) override {
    time([&](Ops& ops) { ops.adamw(constants, control, gradient, master, m, v, weight); });
  }

 private:
  template <typename Call>
  void time(const Call& call) {
    device_.synchronise_wait();
    const auto start = std::chrono::steady_clock::now();
    call(*inner_);
    device_.synchronise_wait();
    const std::chrono::duration<double> elapsed = std::chrono::steady_clock::now() - start;
    dry_.clear();
    call(static_cast<Ops&>(dry_));
    const OpRecord& record = dry_.records().back();
    OpTotals& totals = totals_[std::string(record.op)];
    totals.calls += 1;
    totals.seconds += elapsed.count();
    totals.flops += record.flops;
    totals.bytes += record.bytes;
  }

  std::unique_ptr<Ops> inner_;
  Device& device_;
  DryOps dry_;
  std::map<std::string, OpTotals> totals_;
};

}  // namespace optimus
