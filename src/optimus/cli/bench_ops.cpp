// optimus bench ops CONFIG.toml [--set ...] [--only TEXT] [--json]   every kernel of a step against the machine's ceilings
//
// Operands have the shapes of one micro-batch of the configuration. Grouped products run with experts as even as chance
// makes them and with shares proportional to rank^-0.7 ("zipf": the busiest of 64 has 7 times the mean).
#include "optimus/cli/bench_ops.h"

#include <random>

namespace optimus {
namespace {

using Call = OpTimer::Call;

/// Expert ids [T,K]: K different experts a token, drawn with shares proportional to (e + 1)^-exponent.
std::vector<int32_t> draw_experts(int64_t tokens, int64_t experts, int64_t top_k, double exponent) {
  std::mt19937_64 generator(7);
  std::uniform_real_distribution<double> uniform(1e-12, 1.0);
  std::vector<int32_t> ids;
  std::vector<std::pair<double, int32_t>> keys(static_cast<size_t>(experts));
  for (int64_t t = 0; t < tokens; ++t) {
    for (int64_t e = 0; e < experts;
         ++e)  // Gumbel's trick: the largest of log share + noise are a draw without repetition
      keys[size_t(e)] = {exponent * std::log(double(e + 1)) + std::log(-std::log(uniform(generator))), int32_t(e)};
    std::partial_sort(keys.begin(), keys.begin() + top_k, keys.end());
    for (int64_t k = 0; k < top_k; ++k) ids.push_back(keys[size_t(k)].second);
  }
  return ids;
}

class OpsBench {
 public:
  OpsBench(const RunConfig& config, const std::string& only, Device& device, Ops& ops)
      : config_(config),
        only_(only),
        timer_(config, device, ops),
        device_(device),
        ops_(ops),
        tokens_(config.train.micro_batch * model_.sequence),
        type_(config.compute_dtype()) {}

  OpsBenchResult run() {
    result_.ceilings = timer_.measure_ceilings();
    products();
    attention();
    if (model_.moe_layers() > 0) {
      experts("uniform", 0.0);
      experts("zipf", 0.7);
      router();
    }
    elementwise();
    optimizer();
    return std::move(result_);
  }

 private:
  void row(const std::string& name, const std::string& shape, const OpTimer::Make& make, double work = 1.0) {
    if (only_.empty() || (name + " " + shape).find(only_) != std::string::npos)
      result_.rows.push_back(timer_.time(name, shape, make, work));
  }

  // ---- cases ----

  /// y = x w^T, its input gradient, and its weight gradient added to one of the gradient type.
  void linear(const std::string& name, int64_t rows, int64_t in, int64_t out, DType result) {
    const std::string shape = fmt::format("{} x {} x {}", rows, out, in);
    row(name, shape, [=, this](Operands& o) -> Call {
      const Tensor x = o.normal(type_, {rows, in}), w = o.normal(type_, {out, in}, 0.02f),
                   y = o.empty(result, {rows, out});
      return [=](Ops& ops) { ops.matmul(x, Transpose::no, w, Transpose::yes, y, {}); };
    });
    row(name + " input gradient", shape, [=, this](Operands& o) -> Call {
      const Tensor dy = o.normal(type_, {rows, out}), w = o.normal(type_, {out, in}, 0.02f),
                   dx = o.empty(type_, {rows, in});
      return [=](Ops& ops) { ops.matmul(dy, Transpose::no, w, Transpose::no, dx, {}); };
    });
    row(name + " weight gradient +=", shape, [=, this](Operands& o) -> Call {
      const Tensor dy = o.normal(type_, {rows, out}), x = o.normal(type_, {rows, in});
      const Tensor dw = o.constant(config_.gradient_dtype(), {out, in}, 0.0);
      return [=](Ops& ops) { ops.matmul(dy, Transpose::yes, x, Transpose::no, dw, dw); };
    });
  }

  void products() {
    const int64_t D = model_.hidden, q = model_.query_width(), kv = model_.kv_width();
    linear("qkv projection", tokens_, D, q + 2 * kv, type_);
    linear("output projection", tokens_, q, D, type_);
    if (model_.moe_layers() < model_.layers) linear("mlp gate and up", tokens_, D, 2 * model_.mlp_width, type_);
    linear("head", std::min<int64_t>(tokens_, 4096), D, model_.vocab, type_);
    if (!model_.moe) return;
    const int64_t T = tokens_, E = model_.moe->experts;
    row("router product", fmt::format("{} x {} x {}", T, E, D), [=, this](Operands& o) -> Call {
      const Tensor x = o.normal(type_, {T, D}), w = o.normal(type_, {E, D}, 0.02f), y = o.empty(DType::f32, {T, E});
      return [=](Ops& ops) { ops.matmul(x, Transpose::no, w, Transpose::yes, y, {}); };
    });
  }

  void attention() {
    const int64_t B = config_.train.micro_batch, S = model_.sequence, H = model_.heads, G = model_.kv_heads,
                  W = model_.head_dim, T = tokens_;
    const AttentionShape shape{B, S, S, H, G, W, true, float(1.0 / std::sqrt(double(W)))};
    const std::string text = fmt::format("B {} S {} H {}/{} D {} causal", B, S, H, G, W);
    row("attention", text, [=, this](Operands& o) -> Call {
      const Tensor q = o.normal(type_, {T, H * W}), k = o.normal(type_, {T, G * W}), v = o.normal(type_, {T, G * W});
      const Tensor out = o.empty(type_, {T, H * W}), lse = o.empty(DType::f32, {B, H, S});
      return [=](Ops& ops) { ops.attention(shape, q, k, v, out, lse); };
    });
    // The backward's five products count as two and a half times the forward's two; the dry backend counts four.
    row(
        "attention backward", text + (config_.run.deterministic ? " deterministic" : " any order"),
        [=, this](Operands& o) -> Call {
          const Tensor q = o.normal(type_, {T, H * W}), k = o.normal(type_, {T, G * W}),
                       v = o.normal(type_, {T, G * W});
          const Tensor out = o.normal(type_, {T, H * W}), dout = o.normal(type_, {T, H * W});
          const Tensor lse = o.constant(DType::f32, {B, H, S}, std::log(double(S)) + 0.5);
          const Tensor dq = o.empty(type_, {T, H * W}), dk = o.empty(type_, {T, G * W}),
                       dv = o.empty(type_, {T, G * W});
          const int64_t bytes = std::max<int64_t>(4, ops_.attention_scratch_bytes(shape, type_));
          const Tensor scratch = o.empty(DType::f32, {bytes / 4});
          return [=](Ops& ops) { ops.attention_backward(shape, q, k, v, out, lse, dout, dq, dk, dv, scratch); };
        },
        1.25);
  }

  /// Room for an index over all experts.
  static RouteIndex route(Operands& o, const Tensor& ids, int64_t experts) {
    const int64_t T = ids.rows(), R = ids.elements();
    const auto make = [&](int64_t count) { return o.empty(DType::i32, {count}); };
    return {make(experts + 1), make(R), make(R), make(T + 1), make(R), double(R)};
  }

  void experts(const std::string& routing, double exponent) {
    const MoeConfig& moe = *model_.moe;
    const int64_t E = moe.experts / config_.mesh.ep, K = moe.top_k, F = moe.width, D = model_.hidden, T = tokens_,
                  R = T * K;
    const std::vector<int32_t> chosen = draw_experts(T, E, std::min(K, E), exponent);
    const auto indexed = [=](Operands& o) {
      const Tensor ids = o.indices({T, int64_t(chosen.size()) / T}, chosen);
      const RouteIndex index = route(o, ids, E);
      o.ops().route(ids, 0, 0, index);
      return index;
    };
    const auto grouped = [&](const std::string& name, int64_t in, int64_t out) {
      const std::string shape = fmt::format("{} rows x {} x {}, {} experts {}", R, out, in, E, routing);
      row(name, shape, [=, this](Operands& o) -> Call {
        const RouteIndex index = indexed(o);
        const Tensor x = o.normal(type_, {R, in}), w = o.normal(type_, {E, out, in}, 0.02f),
                     y = o.empty(type_, {R, out});
        return [=](Ops& ops) { ops.grouped_matmul(x, w, index, y); };
      });
      row(name + " input gradient", shape, [=, this](Operands& o) -> Call {
        const RouteIndex index = indexed(o);
        const Tensor dy = o.normal(type_, {R, out}), w = o.normal(type_, {E, out, in}, 0.02f),
                     dx = o.empty(type_, {R, in});
        return [=](Ops& ops) { ops.grouped_matmul_input(dy, w, index, dx); };
      });
      for (const auto& [text, gradient, write] : {std::tuple{" weight gradient", type_, Write::overwrite},
                                                  {" weight gradient f32 +=", DType::f32, Write::accumulate}})
        row(name + text, shape, [=, this, gradient = gradient, write = write](Operands& o) -> Call {
          const RouteIndex index = indexed(o);
          const Tensor dy = o.normal(type_, {R, out}), x = o.normal(type_, {R, in});
          const Tensor dw = o.constant(gradient, {E, out, in}, 0.0);
          return [=](Ops& ops) { ops.grouped_matmul_weight(dy, x, index, dw, write); };
        });
    };
    grouped("experts up", D, 2 * F);
    grouped("experts down", F, D);
    const std::string shape = fmt::format("{} rows of {}, {} experts {}", R, D, E, routing);
    row("route", fmt::format("{} x {}, {} experts {}", T, K, E, routing), [=, this](Operands& o) -> Call {
      const Tensor ids = o.indices({T, int64_t(chosen.size()) / T}, chosen);
      const RouteIndex index = route(o, ids, E);
      return [=](Ops& ops) { ops.route(ids, 0, 0, index); };
    });
    row("gather rows", shape, [=, this](Operands& o) -> Call {
      const RouteIndex index = indexed(o);
      const Tensor x = o.normal(type_, {T, D}), rows = o.empty(type_, {R, D});
      return [=](Ops& ops) { ops.gather_rows(x, index, rows); };
    });
    row("combine rows", shape, [=, this](Operands& o) -> Call {
      const RouteIndex index = indexed(o);
      const Tensor rows = o.normal(type_, {R, D}), x = o.normal(type_, {T, D}), y = o.empty(type_, {T, D});
      return [=](Ops& ops) { ops.combine_rows(rows, index, x, y); };
    });
    const std::string wide = fmt::format("{} rows of 2 x {} {}", R, F, routing);
    row("swiglu", wide, [=, this](Operands& o) -> Call {
      const RouteIndex index = indexed(o);
      const Tensor h = o.normal(type_, {R, 2 * F}), gates = o.constant(DType::f32, {T, K}, 0.125),
                   a = o.empty(type_, {R, F});
      return [=](Ops& ops) { ops.swiglu(h, gates, index.slot_R, index.offsets_L1.slice(E, 1), a); };
    });
    row("swiglu backward", wide, [=, this](Operands& o) -> Call {
      const RouteIndex index = indexed(o);
      const Tensor h = o.normal(type_, {R, 2 * F}), da = o.normal(type_, {R, F}),
                   gates = o.constant(DType::f32, {T, K}, 0.125);
      const Tensor dh = o.empty(type_, {R, 2 * F}), a = o.empty(type_, {R, F}), dgates = o.empty(DType::f32, {T, K});
      return [=](Ops& ops) {
        ops.swiglu_backward(h, da, gates, index.slot_R, index.offsets_L1.slice(E, 1), dh, a, dgates);
      };
    });
  }

  void router() {
    const MoeConfig& moe = *model_.moe;
    const int64_t T = tokens_, E = moe.experts, K = moe.top_k;
    const RouterShape shape{K,
                            moe.score == "softmax" ? ScoreKind::softmax : ScoreKind::sigmoid,
                            moe.normalize_top_k,
                            float(moe.score_scale),
                            moe.groups,
                            moe.top_groups,
                            T};
    const std::string text = fmt::format("{} tokens, {} of {} experts", T, K, E);
    const std::vector<int32_t> chosen = draw_experts(T, E, K, 0.0);
    row("router", text, [=](Operands& o) -> Call {
      const Tensor logits = o.normal(DType::f32, {T, E}), probs = o.empty(DType::f32, {T, E});
      const Tensor gates = o.empty(DType::f32, {T, K}), ids = o.empty(DType::i32, {T, K}),
                   lse = o.empty(DType::f32, {T});
      return [=](Ops& ops) { ops.router(shape, logits, {}, probs, gates, ids, lse); };
    });
    row("router statistics", text, [=](Operands& o) -> Call {
      const Tensor probs = o.constant(DType::f32, {T, E}, 1.0 / double(E)), lse = o.normal(DType::f32, {T});
      const Tensor ids = o.indices({T, K}, chosen), counts = o.empty(DType::f32, {1, E}),
                   sums = o.empty(DType::f32, {1, E});
      const Tensor z = o.constant(DType::f64, {1}, 0.0);
      return [=](Ops& ops) { ops.router_statistics(shape, probs, ids, lse, counts, sums, z); };
    });
    row("router backward", text, [=](Operands& o) -> Call {
      const Tensor logits = o.normal(DType::f32, {T, E}), probs = o.constant(DType::f32, {T, E}, 1.0 / double(E));
      const Tensor gates = o.constant(DType::f32, {T, K}, 0.1), ids = o.indices({T, K}, chosen),
                   lse = o.normal(DType::f32, {T});
      const Tensor dgates = o.normal(DType::f32, {T, K}), balance = o.normal(DType::f32, {1, E}),
                   dlogits = o.empty(DType::f32, {T, E});
      return [=](Ops& ops) {
        ops.router_backward(shape, logits, probs, gates, ids, lse, dgates, balance, 1e-3f, dlogits);
      };
    });
  }

  void norms(const std::string& name, int64_t groups, int64_t columns) {
    const int64_t T = tokens_;
    const std::string shape = fmt::format("{} rows of {} in {}", T, columns, groups);
    row(name, shape, [=, this](Operands& o) -> Call {
      const Tensor x = o.normal(type_, {T, columns}), weight = o.constant(type_, {columns / groups}, 1.0);
      const Tensor y = o.empty(type_, {T, columns}), statistics = o.empty(DType::f32, {T, groups * 2});
      return [=](Ops& ops) { ops.norm(NormKind::rms, 1e-5f, groups, x, weight, {}, {}, y, statistics); };
    });
    row(name + " backward", shape, [=, this](Operands& o) -> Call {
      const Tensor x = o.normal(type_, {T, columns}), weight = o.constant(type_, {columns / groups}, 1.0);
      const Tensor statistics = o.constant(DType::f32, {T, groups * 2}, 1.0), dy = o.normal(type_, {T, columns});
      const Tensor dx = o.empty(type_, {T, columns}),
                   dweight = o.constant(config_.gradient_dtype(), {columns / groups}, 0.0);
      return [=](Ops& ops) {
        ops.norm_backward(NormKind::rms, groups, x, weight, statistics, dy, dy, dx, dweight, {}, Write::accumulate);
      };
    });
  }

  void elementwise() {
    const int64_t T = tokens_, D = model_.hidden, V = model_.vocab, H = model_.heads, W = model_.head_dim;
    norms("norm", 1, D);
    if (model_.qk_norm != "none") norms("query norm", model_.qk_norm == "head" ? H : 1, H * W);
    std::vector<int32_t> positions(static_cast<size_t>(T)), ids(static_cast<size_t>(T));
    std::mt19937_64 generator(3);
    for (int64_t t = 0; t < T; ++t) {
      positions[size_t(t)] = int32_t(t % model_.sequence);
      ids[size_t(t)] = int32_t(generator() % uint64_t(V));
    }
    const int64_t turned = H + model_.kv_heads;  // queries and keys in one call
    row("rope", fmt::format("{} rows of {} heads of {}", T, turned, W), [=, this](Operands& o) -> Call {
      const Tensor x = o.normal(type_, {T, turned * W}), at = o.indices({T}, positions);
      return [=](Ops& ops) { ops.rope(x, at, turned, 1e4f, RopeDirection::forward, x); };
    });
    row("add", fmt::format("{} rows of {}", T, D), [=, this](Operands& o) -> Call {
      const Tensor a = o.normal(type_, {T, D}), b = o.normal(type_, {T, D}), y = o.empty(type_, {T, D});
      return [=](Ops& ops) { ops.add(a, b, y); };
    });
    row("embedding", fmt::format("{} of {} rows of {}", T, V, D), [=, this](Operands& o) -> Call {
      const Tensor at = o.indices({T}, ids), w = o.normal(type_, {V, D}), y = o.empty(type_, {T, D});
      return [=](Ops& ops) { ops.embedding(at, w, y); };
    });
    row("embedding backward +=", fmt::format("{} of {} rows of {}", T, V, D), [=, this](Operands& o) -> Call {
      const Tensor at = o.indices({T}, ids), dy = o.normal(type_, {T, D}),
                   dw = o.constant(config_.gradient_dtype(), {V, D}, 0.0);
      return [=](Ops& ops) { ops.embedding_backward(at, dy, dw, -1, Write::accumulate); };
    });
    const int64_t C = std::min<int64_t>(T, 4096);
    row("cross entropy", fmt::format("{} rows of {}", C, V), [=, this](Operands& o) -> Call {
      const Tensor logits = o.normal(type_, {C, V}), weights = o.constant(DType::f32, {C}, 1.0),
                   loss = o.constant(DType::f64, {1}, 0.0);
      const Tensor targets = o.indices({C}, std::vector<int32_t>(ids.begin(), ids.begin() + C));
      return [=](Ops& ops) { ops.cross_entropy(logits, targets, weights, 1e-4f, loss); };
    });
  }

  void optimizer() {
    const int64_t n = device_.kind() == DeviceKind::cuda ? int64_t(1) << 28 : int64_t(1) << 23;
    const DType gradient = config_.gradient_dtype(), moments = config_.moment_dtype();
    row("sum of squares", fmt::format("{} M {}", n >> 20, name_of(gradient)), [=](Operands& o) -> Call {
      const Tensor x = o.normal(gradient, {n}), out = o.constant(DType::f64, {1}, 0.0);
      return [=](Ops& ops) { ops.sum_squares(x, out); };
    });
    row("adamw",
        fmt::format("{} M, {} weights, {} gradients, {} moments", n >> 20, name_of(type_), name_of(gradient),
                    name_of(moments)),
        [=, this](Operands& o) -> Call {
          const Tensor control = o.constant(DType::f32, {kControlSize}, 1e-4);
          const Tensor g = o.normal(gradient, {n}), m = o.normal(moments, {n}, 1e-3f),
                       v = o.constant(moments, {n}, 1e-3);
          const Tensor weight = o.normal(type_, {n});
          const Tensor master = type_ == DType::f32 ? weight : o.constant(DType::i16, {n}, 0.0);
          AdamwConstants constants{0.9f, 0.95f, 1e-8f, 0.1f};
          constants.rounding = philox_for(1, "bench");
          return [=](Ops& ops) { ops.adamw(constants, control, g, master, m, v, weight); };
        });
  }

  RunConfig config_;
  const ModelConfig& model_ = config_.model;
  std::string only_;
  OpTimer timer_;
  Device& device_;
  Ops& ops_;
  int64_t tokens_;
  DType type_;
  OpsBenchResult result_;
};

}  // namespace

OpsBenchResult bench_ops(const RunConfig& config, const std::string& only, Device& device, Ops& ops) {
  return OpsBench(config, only, device, ops).run();
}

}  // namespace optimus
