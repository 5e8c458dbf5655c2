#include "support/reference.h"

#include <algorithm>
#include <numeric>

namespace optimus::reference {
namespace {

size_t count_of(int64_t n) { return static_cast<size_t>(n); }
int64_t length_of(const Values& values) { return static_cast<int64_t>(values.size()); }

double silu(double x) { return x / (1 + std::exp(-x)); }

double log_sum_exp(const double* x, int64_t n) {
  const double top = *std::max_element(x, x + n);
  double sum = 0;
  for (int64_t i = 0; i < n; ++i) sum += std::exp(x[i] - top);
  return top + std::log(sum);
}

Values softmax(const double* x, int64_t n) {
  const double lse = log_sum_exp(x, n);
  Values out;
  for (int64_t i = 0; i < n; ++i) out.push_back(std::exp(x[i] - lse));
  return out;
}

int64_t expert_of_row(const Indices& offsets, int64_t row) {
  int64_t expert = 0;
  while (offsets[count_of(expert + 1)] <= row) ++expert;
  return expert;
}

}  // namespace

// ---- products ----

Values matmul(const Values& a, Transpose ta, const Values& b, Transpose tb, int64_t m, int64_t n, int64_t k) {
  Values y(count_of(m * n));
  for (int64_t i = 0; i < m; ++i)
    for (int64_t j = 0; j < n; ++j)
      for (int64_t l = 0; l < k; ++l)
        y[count_of(i * n + j)] += a[count_of(ta == Transpose::yes ? l * m + i : i * k + l)] *
                                  b[count_of(tb == Transpose::yes ? j * k + l : l * n + j)];
  return y;
}

Values grouped_matmul(const Values& x, const Values& w, const Indices& offsets, int64_t n, int64_t k) {
  Values y(count_of(offsets.back() * n));
  for (int64_t r = 0; r < offsets.back(); ++r) {
    const double* w_NK = w.data() + expert_of_row(offsets, r) * n * k;
    for (int64_t j = 0; j < n; ++j)
      for (int64_t l = 0; l < k; ++l) y[count_of(r * n + j)] += x[count_of(r * k + l)] * w_NK[j * k + l];
  }
  return y;
}

Values grouped_matmul_input(const Values& dy, const Values& w, const Indices& offsets, int64_t n, int64_t k) {
  Values dx(count_of(offsets.back() * k));
  for (int64_t r = 0; r < offsets.back(); ++r) {
    const double* w_NK = w.data() + expert_of_row(offsets, r) * n * k;
    for (int64_t j = 0; j < n; ++j)
      for (int64_t l = 0; l < k; ++l) dx[count_of(r * k + l)] += dy[count_of(r * n + j)] * w_NK[j * k + l];
  }
  return dx;
}

Values grouped_matmul_weight(const Values& dy, const Values& x, const Indices& offsets, int64_t n, int64_t k) {
  Values dw((offsets.size() - 1) * count_of(n * k));
  for (int64_t r = 0; r < offsets.back(); ++r) {
    double* dw_NK = dw.data() + expert_of_row(offsets, r) * n * k;
    for (int64_t j = 0; j < n; ++j)
      for (int64_t l = 0; l < k; ++l) dw_NK[j * k + l] += dy[count_of(r * n + j)] * x[count_of(r * k + l)];
  }
  return dw;
}

// ---- embedding ----

Values embedding(const Indices& ids, const Values& w, int64_t hidden) {
  Values y;
  for (int64_t id : ids) y.insert(y.end(), w.begin() + id * hidden, w.begin() + (id + 1) * hidden);
  return y;
}

Values embedding_backward(const Indices& ids, const Values& dy, int64_t vocabulary, int64_t hidden,
                          int64_t padding_token) {
  Values dw(count_of(vocabulary * hidden));
  for (size_t t = 0; t < ids.size(); ++t) {
    if (ids[t] == padding_token) continue;
    for (int64_t d = 0; d < hidden; ++d) dw[count_of(ids[t] * hidden + d)] += dy[t * count_of(hidden) + count_of(d)];
  }
  return dw;
}

// ---- normalisation ----

namespace {

struct Moments {
  double mean, reciprocal;
};

Moments moments_of(const NormShape& shape, const double* x) {
  double mean = 0, square = 0;
  if (shape.kind == NormKind::layer) mean = std::accumulate(x, x + shape.width, 0.0) / double(shape.width);
  for (int64_t i = 0; i < shape.width; ++i) square += (x[i] - mean) * (x[i] - mean);
  return {mean, 1 / std::sqrt(square / double(shape.width) + shape.eps)};
}

}  // namespace

NormResult norm(const NormShape& shape, const Values& x, const Values& weight, const Values& bias) {
  NormResult out;
  for (int64_t begin = 0; begin < length_of(x); begin += shape.width) {
    const Moments moments = moments_of(shape, &x[count_of(begin)]);
    out.statistics.insert(out.statistics.end(), {moments.mean, moments.reciprocal});
    for (size_t i = 0; i < count_of(shape.width); ++i) {
      const double x_hat = (x[count_of(begin) + i] - moments.mean) * moments.reciprocal;
      out.y.push_back(x_hat * (weight.empty() ? 1 : weight[i]) + (bias.empty() ? 0 : bias[i]));
    }
  }
  return out;
}

NormGradients norm_backward(const NormShape& shape, const Values& x, const Values& weight, const Values& dy) {
  NormGradients out{Values(x.size()), Values(count_of(shape.width)), Values(count_of(shape.width))};
  for (int64_t begin = 0; begin < length_of(x); begin += shape.width) {
    const Moments moments = moments_of(shape, &x[count_of(begin)]);
    Values x_hat, dx_hat;
    for (size_t i = 0; i < count_of(shape.width); ++i) {
      const double gradient = dy[count_of(begin) + i];
      x_hat.push_back((x[count_of(begin) + i] - moments.mean) * moments.reciprocal);
      dx_hat.push_back(gradient * (weight.empty() ? 1 : weight[i]));
      out.dweight[i] += gradient * x_hat[i];
      out.dbias[i] += gradient;
    }
    const double along = dot(x_hat, dx_hat) / double(shape.width);
    const double mean =
        shape.kind == NormKind::layer ? std::accumulate(dx_hat.begin(), dx_hat.end(), 0.0) / double(shape.width) : 0;
    for (size_t i = 0; i < count_of(shape.width); ++i)
      out.dx[count_of(begin) + i] = moments.reciprocal * (dx_hat[i] - mean - x_hat[i] * along);
  }
  return out;
}

// ---- attention ----

Values rope(const Values& x, const Indices& positions, int64_t heads, double theta, RopeDirection direction) {
  Values y(x.size());
  if (positions.empty()) return y;
  const int64_t width = length_of(x) / int64_t(positions.size()) / heads, half = width / 2;
  for (int64_t vector = 0; vector < length_of(x) / width; ++vector) {
    for (int64_t i = 0; i < half; ++i) {
      const double turn =
          double(positions[count_of(vector / heads)]) * std::pow(theta, -2.0 * double(i) / double(width));
      const double angle = direction == RopeDirection::forward ? turn : -turn;
      const size_t first = count_of(vector * width + i), second = first + count_of(half);
      y[first] = x[first] * std::cos(angle) - x[second] * std::sin(angle);
      y[second] = x[second] * std::cos(angle) + x[first] * std::sin(angle);
    }
  }
  return y;
}

namespace {

/// Calls visit(query row, head, probabilities over the visible keys, log-sum-exp, offset of q, offsets of each key).
template <typename Visitor>
void for_each_query(const AttentionShape& s, const Values& q, const Values& k, Visitor&& visit) {
  for (int64_t b = 0; b < s.sequences; ++b)
    for (int64_t i = 0; i < s.queries; ++i)
      for (int64_t h = 0; h < s.heads; ++h) {
        const int64_t visible = s.causal ? i + s.keys - s.queries + 1 : s.keys;
        const int64_t query = b * s.queries + i, q_at = (query * s.heads + h) * s.head_dim;
        Indices keys_at;
        Values scores;
        for (int64_t j = 0; j < visible; ++j) {
          keys_at.push_back(((b * s.keys + j) * s.kv_heads + h / (s.heads / s.kv_heads)) * s.head_dim);
          double score = 0;
          for (int64_t d = 0; d < s.head_dim; ++d) score += q[count_of(q_at + d)] * k[count_of(keys_at.back() + d)];
          scores.push_back(double(s.scale) * score);
        }
        visit(softmax(scores.data(), visible), log_sum_exp(scores.data(), visible), q_at, keys_at);
      }
}

}  // namespace

AttentionResult attention(const AttentionShape& shape, const Values& q, const Values& k, const Values& v) {
  AttentionResult out{Values(q.size()), Values(q.size() / count_of(shape.head_dim))};
  for_each_query(shape, q, k, [&](const Values& p, double lse, int64_t q_at, const Indices& keys_at) {
    const int64_t query = q_at / shape.head_dim / shape.heads, head = q_at / shape.head_dim % shape.heads;
    const int64_t sequence = query / shape.queries;
    out.lse[count_of((sequence * shape.heads + head) * shape.queries + query % shape.queries)] = lse;
    for (size_t j = 0; j < p.size(); ++j)
      for (int64_t d = 0; d < shape.head_dim; ++d) out.o[count_of(q_at + d)] += p[j] * v[count_of(keys_at[j] + d)];
  });
  return out;
}

AttentionGradients attention_backward(const AttentionShape& shape, const Values& q, const Values& k, const Values& v,
                                      const Values& do_) {
  AttentionGradients out{Values(q.size()), Values(k.size()), Values(v.size())};
  for_each_query(shape, q, k, [&](const Values& p, double, int64_t q_at, const Indices& keys_at) {
    Values dp(p.size());
    for (size_t j = 0; j < p.size(); ++j)
      for (int64_t d = 0; d < shape.head_dim; ++d) {
        dp[j] += do_[count_of(q_at + d)] * v[count_of(keys_at[j] + d)];
        out.dv[count_of(keys_at[j] + d)] += p[j] * do_[count_of(q_at + d)];
      }
    const double mean = dot(p, dp);
    for (size_t j = 0; j < p.size(); ++j)
      for (int64_t d = 0; d < shape.head_dim; ++d) {
        const double dscore = double(shape.scale) * p[j] * (dp[j] - mean);
        out.dq[count_of(q_at + d)] += dscore * k[count_of(keys_at[j] + d)];
        out.dk[count_of(keys_at[j] + d)] += dscore * q[count_of(q_at + d)];
      }
  });
  return out;
}

// ---- gated MLP ----

Values swiglu(const Values& h, const Values& gate_R, int64_t width) {
  Values a;
  for (size_t r = 0; r < gate_R.size(); ++r)
    for (size_t f = 0; f < count_of(width); ++f) {
      const size_t at = r * 2 * count_of(width) + f;
      a.push_back(silu(h[at]) * h[at + count_of(width)] * gate_R[r]);
    }
  return a;
}

SwigluGradients swiglu_backward(const Values& h, const Values& da, const Values& gate_R, int64_t width) {
  SwigluGradients out{Values(h.size()), Values(gate_R.size())};
  for (size_t r = 0; r < gate_R.size(); ++r)
    for (size_t f = 0; f < count_of(width); ++f) {
      const size_t at = r * 2 * count_of(width) + f, up = at + count_of(width);
      const double gradient = da[r * count_of(width) + f], sigmoid = 1 / (1 + std::exp(-h[at]));
      out.dgate_R[r] += gradient * silu(h[at]) * h[up];
      out.dh[at] = gate_R[r] * gradient * h[up] * sigmoid * (1 + h[at] * (1 - sigmoid));
      out.dh[up] = gate_R[r] * gradient * silu(h[at]);
    }
  return out;
}

// ---- router ----

namespace {

Values scores_of(const RouterShape& shape, const double* logits, int64_t experts) {
  if (shape.score == ScoreKind::softmax) return softmax(logits, experts);
  Values out;
  for (int64_t e = 0; e < experts; ++e) out.push_back(1 / (1 + std::exp(-logits[e])));
  return out;
}

/// The `count` largest by value, the lower index first among equals.
Indices best_of(const Values& values, int64_t count) {
  Indices order(values.size());
  std::iota(order.begin(), order.end(), 0);
  std::stable_sort(order.begin(), order.end(),
                   [&](int64_t a, int64_t b) { return values[count_of(a)] > values[count_of(b)]; });
  order.resize(count_of(count));
  return order;
}

}  // namespace

Indices router_choice(const RouterShape& shape, const Values& logits, const Values& bias, int64_t experts) {
  Indices ids;
  const size_t group_size = count_of(experts / shape.groups);
  for (int64_t t = 0; t < length_of(logits) / experts; ++t) {
    Values selection = scores_of(shape, &logits[count_of(t * experts)], experts);
    for (size_t e = 0; e < bias.size(); ++e) selection[e] += bias[e];
    Values group_scores;
    for (auto group = selection.begin(); group != selection.end(); group += int64_t(group_size)) {
      Values sorted(group, group + int64_t(group_size));
      std::sort(sorted.rbegin(), sorted.rend());
      group_scores.push_back(sorted[0] + (group_size > 1 ? sorted[1] : 0));
    }
    const Indices groups = best_of(group_scores, shape.groups > 1 ? shape.top_groups : 1);
    for (size_t e = 0; e < selection.size(); ++e)
      if (std::find(groups.begin(), groups.end(), int64_t(e / group_size)) == groups.end()) selection[e] = -1e300;
    const Indices chosen = best_of(selection, shape.top_k);
    ids.insert(ids.end(), chosen.begin(), chosen.end());
  }
  return ids;
}

RouterResult router(const RouterShape& shape, const Values& logits, const Indices& ids, int64_t experts) {
  RouterResult out;
  for (int64_t t = 0; t < length_of(logits) / experts; ++t) {
    const double* row = &logits[count_of(t * experts)];
    const Values scores = scores_of(shape, row, experts);
    const double total = std::accumulate(scores.begin(), scores.end(), 0.0);
    for (double score : scores) out.probs.push_back(score / total);
    double chosen = 0;
    for (int64_t k = 0; k < shape.top_k; ++k) chosen += scores[count_of(ids[count_of(t * shape.top_k + k)])];
    for (int64_t k = 0; k < shape.top_k; ++k)
      out.gates.push_back(double(shape.score_scale) * scores[count_of(ids[count_of(t * shape.top_k + k)])] /
                          (shape.normalize_top_k ? chosen : 1));
    out.lse.push_back(log_sum_exp(row, experts));
  }
  return out;
}

Values router_backward(const RouterShape& shape, const Values& logits, const Indices& ids, const Values& dgates,
                       const Values& balance, double z_scale, int64_t experts) {
  Values dlogits;
  for (int64_t t = 0; t < length_of(logits) / experts; ++t) {
    const double* row = &logits[count_of(t * experts)];
    const Values scores = scores_of(shape, row, experts), p = softmax(row, experts);
    const double total = std::accumulate(scores.begin(), scores.end(), 0.0);
    Values dscores(count_of(experts));
    if (!balance.empty()) {
      const Values by_prob(balance.begin() + t / shape.tokens_per_unit * experts,
                           balance.begin() + (t / shape.tokens_per_unit + 1) * experts);
      for (size_t e = 0; e < scores.size(); ++e) dscores[e] = (by_prob[e] - dot(by_prob, scores) / total) / total;
    }
    double chosen = 0, along = 0;
    for (size_t s = count_of(t * shape.top_k); s < count_of((t + 1) * shape.top_k); ++s) {
      chosen += scores[count_of(ids[s])];
      along += dgates[s] * scores[count_of(ids[s])];
    }
    for (size_t s = count_of(t * shape.top_k); s < count_of((t + 1) * shape.top_k); ++s)
      dscores[count_of(ids[s])] +=
          double(shape.score_scale) * (shape.normalize_top_k ? (dgates[s] - along / chosen) / chosen : dgates[s]);
    for (size_t e = 0; e < scores.size(); ++e) {
      const double by_score = shape.score == ScoreKind::softmax ? scores[e] * (dscores[e] - dot(dscores, scores))
                                                                : scores[e] * (1 - scores[e]) * dscores[e];
      dlogits.push_back(by_score + 2 * z_scale * log_sum_exp(row, experts) * p[e]);
    }
  }
  return dlogits;
}

// ---- dispatch ----

Route route(const Indices& ids, int64_t top_k, int64_t first_expert, int64_t local_experts) {
  Route out{{0}, {}, {}, {0}, {}};
  for (int64_t expert = first_expert; expert < first_expert + local_experts; ++expert) {
    for (size_t slot = 0; slot < ids.size(); ++slot) {
      if (ids[slot] != expert) continue;
      out.token.push_back(int64_t(slot) / top_k);
      out.slot.push_back(int64_t(slot));
    }
    out.offsets.push_back(int64_t(out.slot.size()));
  }
  Indices row_of_slot(ids.size(), -1);
  for (size_t row = 0; row < out.slot.size(); ++row) row_of_slot[count_of(out.slot[row])] = int64_t(row);
  for (size_t slot = 0; slot < ids.size(); ++slot) {
    if (row_of_slot[slot] >= 0) out.row.push_back(row_of_slot[slot]);
    if ((int64_t(slot) + 1) % top_k == 0) out.row_ptr.push_back(int64_t(out.row.size()));
  }
  return out;
}

Route wave(const Route& all, int64_t first_row, int64_t capacity) {
  Route out{{}, {}, {}, {0}, {}};
  const auto inside = [&](int64_t row) { return row >= first_row && row < first_row + capacity; };
  for (int64_t offset : all.offsets)
    out.offsets.push_back(std::min(std::max(offset, first_row), first_row + capacity) - first_row);
  for (size_t row = 0; row < all.token.size(); ++row) {
    if (!inside(int64_t(row))) continue;
    out.token.push_back(all.token[row]);
    out.slot.push_back(all.slot[row]);
  }
  for (size_t t = 0; t + 1 < all.row_ptr.size(); ++t) {
    for (int64_t entry = all.row_ptr[t]; entry < all.row_ptr[t + 1]; ++entry)
      if (inside(all.row[count_of(entry)])) out.row.push_back(all.row[count_of(entry)] - first_row);
    out.row_ptr.push_back(int64_t(out.row.size()));
  }
  return out;
}

Route route_to_ranks(const Indices& ids, int64_t top_k, int64_t experts_per_rank, int64_t ranks) {
  const int64_t tokens = int64_t(ids.size()) / top_k;
  std::vector<Indices> ranks_of(count_of(tokens));  // without repetition, in the order of the token's experts
  for (size_t slot = 0; slot < ids.size(); ++slot) {
    Indices& mine = ranks_of[slot / count_of(top_k)];
    for (int64_t rank = 0; rank < ranks; ++rank)
      for (int64_t expert = rank * experts_per_rank; expert < (rank + 1) * experts_per_rank; ++expert)
        if (ids[slot] == expert && std::find(mine.begin(), mine.end(), rank) == mine.end()) mine.push_back(rank);
  }
  Route out{{0}, {}, {}, {0}, {}};
  std::vector<Indices> row_of(count_of(tokens), Indices(count_of(ranks)));
  for (int64_t rank = 0; rank < ranks; ++rank) {
    for (int64_t t = 0; t < tokens; ++t) {
      const Indices& mine = ranks_of[count_of(t)];
      if (std::find(mine.begin(), mine.end(), rank) == mine.end()) continue;
      row_of[count_of(t)][count_of(rank)] = int64_t(out.token.size());
      out.token.push_back(t);
    }
    out.offsets.push_back(int64_t(out.token.size()));
  }
  for (size_t t = 0; t < ranks_of.size(); ++t) {
    for (int64_t rank : ranks_of[t]) out.row.push_back(row_of[t][count_of(rank)]);
    out.row_ptr.push_back(int64_t(out.row.size()));
  }
  return out;
}

Values gather_rows(const Values& x, const Route& route, int64_t hidden) { return embedding(route.token, x, hidden); }

Values combine_rows(const Values& rows, const Route& route, int64_t hidden) {
  return embedding_backward(route.token, rows, int64_t(route.row_ptr.size()) - 1, hidden, -1);
}

// ---- loss ----

CrossEntropyResult cross_entropy(const Values& logits, const Indices& targets, const Values& weights) {
  CrossEntropyResult out{0, Values(logits.size())};
  const int64_t vocabulary = targets.empty() ? 0 : length_of(logits) / int64_t(targets.size());
  for (size_t t = 0; t < targets.size(); ++t) {
    if (weights[t] == 0) continue;
    const size_t row = t * count_of(vocabulary);
    const Values p = softmax(&logits[row], vocabulary);
    out.loss += weights[t] * (log_sum_exp(&logits[row], vocabulary) - logits[row + count_of(targets[t])]);
    for (size_t i = 0; i < p.size(); ++i) out.gradient[row + i] = weights[t] * (p[i] - (int64_t(i) == targets[t]));
  }
  return out;
}

// ---- optimizer ----

void adamw(const AdamwConstants& constants, const AdamwStep& step, const Values& gradient, AdamwState& state) {
  const double beta1 = constants.beta1, beta2 = constants.beta2;
  for (size_t i = 0; i < gradient.size(); ++i) {
    const double g = step.clip * gradient[i];
    state.master[i] -= step.learning_rate * double(constants.weight_decay) * state.master[i];
    state.m[i] = beta1 * state.m[i] + (1 - beta1) * g;
    state.v[i] = beta2 * state.v[i] + (1 - beta2) * g * g;
    state.master[i] -= step.learning_rate * (state.m[i] / step.correction1) /
                       (std::sqrt(state.v[i] / step.correction2) + double(constants.eps));
  }
}

// ---- helpers ----

double dot(const Values& a, const Values& b) { return std::inner_product(a.begin(), a.end(), b.begin(), 0.0); }

Values sum(const Values& a, const Values& b) {
  Values out(a);
  for (size_t i = 0; i < b.size(); ++i) out[i] += b[i];
  return out;
}

Values numeric_gradient(const std::function<double(const Values&)>& f, Values x) {
  Values out(x.size());
  for (size_t i = 0; i < x.size(); ++i) {
    const double at = x[i], h = 1e-3;
    const auto difference = [&](double step) {
      x[i] = at + step;
      const double above = f(x);
      x[i] = at - step;
      const double below = f(x);
      x[i] = at;
      return above - below;
    };
    out[i] = (8 * difference(h) - difference(2 * h)) / (12 * h);
  }
  return out;
}

}  // namespace optimus::reference
