#include "optimus/parallel/dispatchers.h"

#include <cmath>
#include <numeric>

#include "optimus/model/context.h"

namespace optimus {
namespace {

class LocalDispatcher final : public TokenDispatcher {
 public:
  bool local() const override { return true; }
  int64_t capacity(int64_t tokens) const override { return tokens; }
  bool one_wave(int64_t) const override { return true; }
  void begin(Context&, Tensor ids_TK, DispatchPlan& plan) const override { plan.capacity = ids_TK.rows(); }
  int64_t tokens(const DispatchPlan& plan, int64_t) const override { return plan.capacity; }
  Tensor dispatch(Context&, const DispatchPlan&, int64_t, Tensor x_TC, Arena&) const override { return x_TC; }
  void combine(Context&, const DispatchPlan&, int64_t, Tensor, Tensor, Tensor) const override {
    expects(false, "local tokens need no combine");
  }
};

class AllgatherDispatcher final : public TokenDispatcher {
 public:
  explicit AllgatherDispatcher(Communicator& ep) : ep_(ep) {}

  bool local() const override { return false; }
  int64_t capacity(int64_t tokens) const override { return tokens * ep_.size(); }
  bool one_wave(int64_t) const override { return true; }
  void begin(Context&, Tensor ids_TK, DispatchPlan& plan) const override { plan.capacity = capacity(ids_TK.rows()); }
  int64_t tokens(const DispatchPlan& plan, int64_t) const override { return plan.capacity; }

  Tensor dispatch(Context&, const DispatchPlan& plan, int64_t, Tensor x_TC, Arena& arena) const override {
    const Tensor all_NC = arena.allocate(x_TC.dtype, {plan.capacity, x_TC.columns()}, "dispatched");
    ep_.all_gather(x_TC, all_NC);
    return all_NC;
  }

  void combine(Context& c, const DispatchPlan&, int64_t, Tensor part_NC, Tensor addend_TC, Tensor y_TC) const override {
    Arena::Scope scope(c.workspace);
    const Tensor sum_TC = addend_TC ? c.temporary(y_TC.dtype, y_TC.shape) : y_TC;
    const Tensor scratch = ep_.reduce_needs_scratch() ? c.temporary(part_NC.dtype, part_NC.shape) : Tensor{};
    ep_.reduce_scatter(part_NC, sum_TC, scratch);
    if (addend_TC) c.ops.add(sum_TC, addend_TC, y_TC);
  }

 private:
  Communicator& ep_;
};

class AlltoallDispatcher final : public TokenDispatcher {
 public:
  AlltoallDispatcher(Communicator& ep, Device& device, const MoeConfig& moe, double moe_rows)
      : ep_(ep),
        device_(device),
        ranks_(ep.size()),
        experts_per_rank_(moe.experts / ep.size()),
        top_k_(moe.top_k),
        share_(destination_share(moe, ep.size())),
        moe_rows_(moe_rows) {}

  bool local() const override { return false; }
  int64_t capacity(int64_t tokens) const override {
    return std::min(tokens * ranks_, int64_t(std::ceil(moe_rows_ * share_ * double(tokens * ranks_))));
  }
  bool one_wave(int64_t tokens) const override { return capacity(tokens) == tokens * ranks_; }

  void begin(Context& c, Tensor ids_TK, DispatchPlan& plan) const override {
    const int64_t T = ids_TK.rows(), rows = send_capacity(T);
    const auto indices = [&](int64_t count) { return c.save(DType::i32, {count}, "router"); };
    plan.capacity = capacity(T);
    plan.send = {indices(ranks_ + 1), indices(rows), {}, indices(T + 1), indices(rows)};
    plan.send.balanced_rows = share_ * double(T * ranks_);
    c.ops.route_to_ranks(ids_TK, experts_per_rank_, plan.send);
    exchange_counts_wait(c, T, plan);
    if (device_.dry()) {
      plan.waves = one_wave(T) || !c.further_waves ? 1 : 2;  // a second one stands for all further
      return;
    }
    plan.waves = 1;
    for (int64_t to = 0; to < ranks_; ++to)
      plan.waves = std::max(plan.waves, (received(plan, to) + plan.capacity - 1) / plan.capacity);
  }

  int64_t tokens(const DispatchPlan& plan, int64_t wave) const override {
    if (device_.dry()) return plan.capacity;
    return total(receive_rows(plan, wave));
  }

  Tensor dispatch(Context& c, const DispatchPlan& plan, int64_t wave, Tensor x_TC, Arena& arena) const override {
    const int64_t C = x_TC.columns();
    const Tensor out_NC = arena.allocate(x_TC.dtype, {tokens(plan, wave), C}, "dispatched");
    Arena::Scope scope(c.workspace);
    const Tensor rows = c.temporary(x_TC.dtype, {send_capacity(x_TC.rows()), C});
    c.ops.gather_rows(x_TC, plan.send, rows);
    const std::vector<int64_t> counts = send_rows(plan, wave);
    const Tensor packed = plan.waves == 1 ? rows : c.temporary(x_TC.dtype, rows.shape);
    if (plan.waves > 1)
      for_each_piece(plan, wave, [&](int64_t at, int64_t from, int64_t count) {
        c.ops.copy(rows.slice(from, count), packed.slice(at, count));
      });
    ep_.start_all_to_all(packed, counts, out_NC, receive_rows(plan, wave))->wait();
    return out_NC;
  }

  void combine(Context& c, const DispatchPlan& plan, int64_t wave, Tensor part_NC, Tensor addend_TC,
               Tensor y_TC) const override {
    Arena::Scope scope(c.workspace);
    const Tensor rows = c.temporary(y_TC.dtype, {send_capacity(y_TC.rows()), y_TC.columns()});
    const Tensor packed = plan.waves == 1 ? rows : c.temporary(y_TC.dtype, rows.shape);
    ep_.start_all_to_all(part_NC, receive_rows(plan, wave), packed, send_rows(plan, wave))->wait();
    if (plan.waves > 1) {
      c.ops.fill(rows, 0.0);
      for_each_piece(plan, wave, [&](int64_t at, int64_t from, int64_t count) {
        c.ops.copy(packed.slice(at, count), rows.slice(from, count));
      });
    }
    c.ops.combine_rows(rows, plan.send, addend_TC, y_TC);
  }

 private:
  int64_t send_capacity(int64_t tokens) const { return tokens * std::min<int64_t>(top_k_, ranks_); }
  static int64_t total(const std::vector<int64_t>& rows) {
    return std::accumulate(rows.begin(), rows.end(), int64_t(0));
  }
  int64_t rows(const DispatchPlan& plan, int64_t from, int64_t to) const {
    return plan.rows_PP[size_t(from * ranks_ + to)];
  }
  int64_t received(const DispatchPlan& plan, int64_t to) const {
    int64_t sum = 0;
    for (int64_t from = 0; from < ranks_; ++from) sum += rows(plan, from, to);
    return sum;
  }

  // Every rank learns how many tokens go from each rank to each.
  void exchange_counts_wait(Context& c, int64_t T, DispatchPlan& plan) const {
    Arena::Scope scope(c.workspace);
    const Tensor offsets = c.temporary(DType::i32, {ranks_, ranks_ + 1});
    ep_.all_gather(plan.send.offsets_L1, offsets);
    plan.rows_PP.assign(size_t(ranks_ * ranks_), int64_t(share_ * double(T)));
    if (device_.dry()) return;
    std::vector<int32_t> host(size_t(offsets.elements()));
    device_.to_host_wait(host.data(), offsets);
    for (int64_t from = 0; from < ranks_; ++from)
      for (int64_t to = 0; to < ranks_; ++to) {
        const int32_t* begin = host.data() + from * (ranks_ + 1) + to;
        plan.rows_PP[size_t(from * ranks_ + to)] = begin[1] - begin[0];
      }
  }

  // A rank's incoming tokens, by sending rank, form one stream; wave w is its piece [w, w + 1) * capacity. The rows that
  // `from` sends to `to` in the wave: how many, and the first one's number among all that it sends there.
  struct Piece {
    int64_t first, count;
  };
  Piece piece(const DispatchPlan& plan, int64_t wave, int64_t from, int64_t to) const {
    if (device_.dry()) return {0, wave == 0 ? rows(plan, from, to) : 0};
    int64_t begin = 0;
    for (int64_t rank = 0; rank < from; ++rank) begin += rows(plan, rank, to);
    const int64_t end = begin + rows(plan, from, to);
    const int64_t first = std::clamp(wave * plan.capacity, begin, end);
    const int64_t last = std::clamp((wave + 1) * plan.capacity, begin, end);
    return {first - begin, last - first};
  }
  std::vector<int64_t> send_rows(const DispatchPlan& plan, int64_t wave) const {
    std::vector<int64_t> counts;
    for (int64_t to = 0; to < ranks_; ++to) counts.push_back(piece(plan, wave, ep_.rank(), to).count);
    return counts;
  }
  std::vector<int64_t> receive_rows(const DispatchPlan& plan, int64_t wave) const {
    std::vector<int64_t> counts;
    for (int64_t from = 0; from < ranks_; ++from) counts.push_back(piece(plan, wave, from, ep_.rank()).count);
    return counts;
  }
  /// visit(row in the packed buffer, row among all that this rank sends, count) for every destination of the wave.
  template <typename Visit>
  void for_each_piece(const DispatchPlan& plan, int64_t wave, Visit&& visit) const {
    int64_t packed = 0, sent = 0;
    for (int64_t to = 0; to < ranks_; ++to) {
      const Piece part = piece(plan, wave, ep_.rank(), to);
      if (part.count > 0) visit(packed, sent + part.first, part.count);
      packed += part.count;
      sent += rows(plan, ep_.rank(), to);
    }
  }

  Communicator& ep_;
  Device& device_;
  int64_t ranks_, experts_per_rank_, top_k_;
  double share_, moe_rows_;
};

}  // namespace

std::unique_ptr<TokenDispatcher> make_local_dispatcher() { return std::make_unique<LocalDispatcher>(); }
std::unique_ptr<TokenDispatcher> make_allgather_dispatcher(Communicator& ep) {
  return std::make_unique<AllgatherDispatcher>(ep);
}
std::unique_ptr<TokenDispatcher> make_alltoall_dispatcher(Communicator& ep, Device& device, const MoeConfig& moe,
                                                          double moe_rows) {
  return std::make_unique<AlltoallDispatcher>(ep, device, moe, moe_rows);
}

double destination_share(const MoeConfig& moe, int64_t ep) {
  const int64_t elsewhere = moe.experts - moe.experts / ep;
  double none = 1;  // that no chosen expert is on a given rank
  for (int64_t k = 0; k < moe.top_k; ++k) none *= std::max(0.0, double(elsewhere - k)) / double(moe.experts - k);
  return 1 - none;
}

// Bytes of a token's way there and back, in copies: all-gather and reduce-scatter move P - 1, alltoall q (P - 1).
// Where nearly all ranks are meant anyway, not counting and not waiting is worth the rest.
std::string dispatcher_for(const std::string& asked, const MoeConfig& moe, int64_t ep) {
  if (ep == 1) return "local";
  if (asked != "auto") return asked;
  constexpr double kWorthCounting = 0.8;
  return destination_share(moe, ep) < kWorthCounting ? "alltoall" : "allgather";
}

}  // namespace optimus
