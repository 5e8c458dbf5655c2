// The router's scores, choice and losses.
//
// Scores s are softmax(logits) or sigmoid(logits); probs are s, divided by their sum for the sigmoid. With n the sum of
// the chosen scores where gates are normalised (plus 1e-20 for the sigmoid), else 1: gate_k = score_scale s_k / n.
// Backward, with d_k = dgates_k score_scale:
//   ds_k = (d_k - [normalised] sum_j d_j s_j / n) / n                        at the chosen experts
//   softmax: dlogit = s (ds + balance - sum_e s (ds + balance))
//   sigmoid: dlogit = s (1 - s) (ds + (balance - sum_e probs balance) / sum_e s)
// and both add 2 z_scale lse softmax(logits).
#include <cmath>
#include <limits>
#include <utility>
#include <vector>

#include "optimus/ops/cpu/cpu_ops.h"
#include "optimus/ops/cpu/vector_math.h"

namespace optimus::cpu {
namespace {

constexpr int64_t kWorkEach = 16;
constexpr float kLowest = -std::numeric_limits<float>::infinity();

/// The `wanted` largest keys, descending, the lower index first among equals. NaN counts as lowest.
class TopK {
 public:
  explicit TopK(int64_t wanted) : indices_(size_t(wanted)), keys_(size_t(wanted)) {}

  template <typename Key>
  const std::vector<int32_t>& choose(int64_t count, Key&& key_of) {
    const int64_t wanted = int64_t(keys_.size());
    int64_t found = 0;
    for (int64_t i = 0; i < count; ++i) {
      float key = key_of(i);
      if (std::isnan(key)) key = kLowest;
      if (found == wanted && !(key > keys_[size_t(found - 1)])) continue;
      int64_t place = found < wanted ? found++ : found - 1;
      for (; place > 0 && key > keys_[size_t(place - 1)]; --place) {
        keys_[size_t(place)] = keys_[size_t(place - 1)];
        indices_[size_t(place)] = indices_[size_t(place - 1)];
      }
      keys_[size_t(place)] = key;
      indices_[size_t(place)] = int32_t(i);
    }
    return indices_;
  }

 private:
  std::vector<int32_t> indices_;
  std::vector<float> keys_;
};

/// Chooses a token's experts; one a thread.
class Selector {
 public:
  Selector(const RouterShape& shape, int64_t experts)
      : experts_(experts),
        group_size_(experts / shape.groups),
        experts_top_(shape.top_k),
        groups_top_(shape.top_groups),
        scores_(size_t(experts)),
        group_scores_(size_t(shape.groups)) {}

  /// The selection scores, to be filled before choose().
  float* scores() { return scores_.data(); }

  const std::vector<int32_t>& choose() {
    if (group_scores_.size() > 1) exclude_groups();
    return experts_top_.choose(experts_, [&](int64_t e) { return scores_[size_t(e)]; });
  }

 private:
  void exclude_groups() {
    const int64_t groups = int64_t(group_scores_.size());
    for (int64_t g = 0; g < groups; ++g) {
      float best = kLowest, second = kLowest;
      for (int64_t e = g * group_size_; e < (g + 1) * group_size_; ++e) {
        const float score = scores_[size_t(e)];
        if (score > best) second = std::exchange(best, score);
        else if (score > second) second = score;
      }
      group_scores_[size_t(g)] = group_size_ > 1 ? best + second : best;
    }
    for (int32_t g : groups_top_.choose(groups, [&](int64_t g) { return group_scores_[size_t(g)]; })) {
      group_scores_[size_t(g)] = std::numeric_limits<float>::quiet_NaN();  // marks the chosen
    }
    for (int64_t g = 0; g < groups; ++g) {
      if (!std::isnan(group_scores_[size_t(g)])) std::fill_n(scores_.begin() + g * group_size_, group_size_, kLowest);
    }
  }

  int64_t experts_, group_size_;
  TopK experts_top_, groups_top_;
  std::vector<float> scores_, group_scores_;
};

/// to = e^(logits - max) ; returns logsumexp(logits).
float exponentials(const float* logits, int64_t experts, float* to, float& sum) {
  float maximum = logits[0];
#pragma omp simd reduction(max : maximum)
  for (int64_t e = 0; e < experts; ++e) maximum = logits[e] > maximum ? logits[e] : maximum;
  float total = 0.0f;
#pragma omp simd reduction(+ : total)
  for (int64_t e = 0; e < experts; ++e) {
    to[e] = fast_exp(logits[e] - maximum);
    total += to[e];
  }
  sum = total;
  return maximum + std::log(total);
}

float sigmoids(const float* logits, int64_t experts, float* to) {
  float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
  for (int64_t e = 0; e < experts; ++e) {
    to[e] = sigmoid(logits[e]);
    sum += to[e];
  }
  return sum;
}

void scale_into(const float* from, int64_t count, float factor, float* to) {
#pragma omp simd
  for (int64_t i = 0; i < count; ++i) to[i] = from[i] * factor;
}

/// What the chosen scores are divided by.
float normaliser(const RouterShape& shape, const float* scores, const int32_t* ids) {
  if (!shape.normalize_top_k) return 1.0f;
  float sum = shape.score == ScoreKind::sigmoid ? 1e-20f : 0.0f;
  for (int64_t k = 0; k < shape.top_k; ++k) sum += scores[ids[k]];
  return sum;
}

}  // namespace

void CpuOps::router(const RouterShape& shape, Tensor logits_TE, Tensor bias_E, Tensor probs_TE, Tensor gates_TK,
                    Tensor ids_TK, Tensor lse_T) {
  const int64_t experts = logits_TE.columns();
  expects(experts % shape.groups == 0 && shape.top_k <= experts / shape.groups * shape.top_groups &&
              shape.top_groups <= shape.groups,
          "router: top {} of {} experts in the best {} of {} groups", shape.top_k, experts, shape.top_groups,
          shape.groups);
  const Rows<float> all_logits(logits_TE), all_probs(probs_TE), all_gates(gates_TK);
  const Rows<int32_t> all_ids(ids_TK);
  const float* bias = bias_E ? bias_E.as<float>() : nullptr;
  float* lse = lse_T.as<float>();

  parallel_ranges(logits_TE.rows(), kWorkEach * experts, [&](int64_t begin, int64_t end) {
    Selector selector(shape, experts);
    std::vector<float> scores(static_cast<size_t>(experts));
    for (int64_t t = begin; t < end; ++t) {
      float sum;
      lse[t] = exponentials(all_logits[t], experts, scores.data(), sum);
      if (shape.score == ScoreKind::sigmoid) sum = sigmoids(all_logits[t], experts, scores.data());
      scale_into(scores.data(), experts, 1.0f / sum, all_probs[t]);
      if (shape.score == ScoreKind::softmax) std::copy_n(all_probs[t], experts, scores.begin());

      float* selection = selector.scores();
      for (int64_t e = 0; e < experts; ++e) selection[e] = bias ? scores[size_t(e)] + bias[e] : scores[size_t(e)];
      std::copy_n(selector.choose().begin(), shape.top_k, all_ids[t]);
      const float factor = shape.score_scale / normaliser(shape, scores.data(), all_ids[t]);
      for (int64_t k = 0; k < shape.top_k; ++k) all_gates[t][k] = factor * scores[size_t(all_ids[t][k])];
    }
  });
}

void CpuOps::router_statistics(const RouterShape& shape, Tensor probs_TE, Tensor ids_TK, Tensor lse_T, Tensor counts_UE,
                               Tensor prob_sums_UE, Tensor z_sum) {
  constexpr int64_t kChunkTokens = 128;
  const int64_t tokens = probs_TE.rows(), experts = probs_TE.columns(), units = counts_UE.rows();
  const int64_t unit_tokens = std::max<int64_t>(shape.tokens_per_unit, 1);
  const int64_t unit_chunks = ceil_div(unit_tokens, kChunkTokens), chunks = units * unit_chunks;
  const Rows<float> probs(probs_TE), counts(counts_UE), prob_sums(prob_sums_UE);
  const Rows<int32_t> ids(ids_TK);
  const float* lse = lse_T.as<float>();
  const int64_t stride = 2 * experts + 1;  // of each chunk: counts [E], sums of probs [E], sum of lse^2
  double* partials = scratch_.request<double>(chunks * stride);

  parallel_ranges(chunks, kChunkTokens * (experts + 4 * shape.top_k), [&](int64_t first, int64_t last) {
    for (int64_t chunk = first; chunk < last; ++chunk) {
      double* chunk_counts = partials + chunk * stride;
      double* chunk_sums = chunk_counts + experts;
      double& squares = chunk_sums[experts];
      std::fill_n(chunk_counts, stride, 0.0);
      const int64_t unit_end = std::min(tokens, (chunk / unit_chunks + 1) * unit_tokens);
      const int64_t begin = chunk / unit_chunks * unit_tokens + chunk % unit_chunks * kChunkTokens;
      for (int64_t t = begin; t < std::min(unit_end, begin + kChunkTokens); ++t) {
        const float* row = probs[t];
#pragma omp simd
        for (int64_t e = 0; e < experts; ++e) chunk_sums[e] += double(row[e]);
        for (int64_t k = 0; k < shape.top_k; ++k) chunk_counts[ids[t][k]] += 1.0;
        squares += double(lse[t]) * double(lse[t]);
      }
    }
  });

  double& z = *z_sum.as<double>();
  for (int64_t unit = 0; unit < units; ++unit) {
    double* totals = partials + unit * unit_chunks * stride;
    for (int64_t chunk = 1; chunk < unit_chunks; ++chunk) {
      for (int64_t i = 0; i < stride; ++i) totals[i] += totals[chunk * stride + i];
    }
    for (int64_t e = 0; e < experts; ++e) {
      counts[unit][e] = float(totals[e]);
      prob_sums[unit][e] = float(totals[experts + e]);
    }
    z += totals[2 * experts];
  }
}

void CpuOps::router_backward(const RouterShape& shape, Tensor logits_TE, Tensor probs_TE, Tensor gates_TK,
                             Tensor ids_TK, Tensor lse_T, Tensor dgates_TK, Tensor balance_UE, float z_scale,
                             Tensor dlogits_TE) {
  const int64_t experts = logits_TE.columns();
  const Rows<float> all_logits(logits_TE), all_probs(probs_TE), all_gates(gates_TK), all_dgates(dgates_TK);
  const Rows<float> all_balance(balance_UE), all_dlogits(dlogits_TE);
  const Rows<int32_t> all_ids(ids_TK);
  const float* lse = lse_T.as<float>();
  const bool softmax = shape.score == ScoreKind::softmax;

  parallel_ranges(logits_TE.rows(), kWorkEach * experts, [&](int64_t begin, int64_t end) {
    std::vector<float> dscores(static_cast<size_t>(experts)), sigmoid_scores(static_cast<size_t>(experts));
    for (int64_t t = begin; t < end; ++t) {
      const float* logits = all_logits[t];
      const float* probs = all_probs[t];
      const int32_t* ids = all_ids[t];
      const float* balance = all_balance ? all_balance[t / shape.tokens_per_unit] : nullptr;
      float sum = 1.0f;  // scores = sum * probs
      if (!softmax) sum = sigmoids(logits, experts, sigmoid_scores.data());
      const float* scores = softmax ? probs : sigmoid_scores.data();

      // The balance loss's gradient by the scores; its projection on probs is subtracted below for the softmax.
      float projection = 0.0f;
      for (int64_t e = 0; balance && !softmax && e < experts; ++e) projection += balance[e] * probs[e];
      for (int64_t e = 0; e < experts; ++e) dscores[size_t(e)] = balance ? (balance[e] - projection) / sum : 0.0f;

      const float n = normaliser(shape, scores, ids);
      float mean = 0.0f;
      for (int64_t k = 0; shape.normalize_top_k && k < shape.top_k; ++k) mean += all_dgates[t][k] * scores[ids[k]] / n;
      for (int64_t k = 0; k < shape.top_k; ++k) {
        dscores[size_t(ids[k])] += shape.score_scale * (all_dgates[t][k] - mean) / n;
      }

      const float z = 2.0f * z_scale * lse[t];
      float* dlogits = all_dlogits[t];
      if (softmax) {
        float inner = 0.0f;
        for (int64_t e = 0; e < experts; ++e) inner += probs[e] * dscores[size_t(e)];
        for (int64_t e = 0; e < experts; ++e) dlogits[e] = probs[e] * (dscores[size_t(e)] - inner + z);
      } else {
#pragma omp simd
        for (int64_t e = 0; e < experts; ++e) {
          dlogits[e] = scores[e] * (1.0f - scores[e]) * dscores[size_t(e)] + z * fast_exp(logits[e] - lse[t]);
        }
      }
    }
  });
}

void CpuOps::balance_loss(Tensor counts_UE, Tensor prob_sums_UE, Tensor fixed_f_E, double tokens, double scale,
                          double gradient_scale, Tensor loss, Tensor gradient_UE) {
  const int64_t experts = counts_UE.columns();
  const Rows<float> counts(counts_UE), prob_sums(prob_sums_UE), gradients(gradient_UE);
  const float* fixed_f = fixed_f_E ? fixed_f_E.as<float>() : nullptr;
  double sum = 0.0;
  for (int64_t unit = 0; unit < counts_UE.rows(); ++unit) {
    for (int64_t e = 0; e < experts; ++e) {
      const double f = fixed_f ? double(fixed_f[e]) : double(counts[unit][e]) / tokens;
      sum += f * double(prob_sums[unit][e]) / tokens;
      gradients[unit][e] = float(gradient_scale * double(experts) * f / tokens);
    }
  }
  *loss.as<double>() += scale * double(experts) * sum;
}

}  // namespace optimus::cpu
