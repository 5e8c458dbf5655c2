// Weighted cross-entropy over the vocabulary and its gradient, which replaces the logits:
//   loss = sum_t weight (lse - logit[target]),  dlogits = scale weight (e^(logit - lse) - onehot).
#include <cmath>

#include "optimus/ops/cpu/cpu_ops.h"
#include "optimus/ops/cpu/vector_math.h"

namespace optimus::cpu {
namespace {

constexpr int64_t kChunkRows = 16;  // rows whose losses are summed before they meet other rows'
constexpr int64_t kPartial = 4096;  // exponentials summed in f32 before they are added in f64

template <typename T>
double log_sum_exp(const T* logits, int64_t vocab) {
  float maximum = float(logits[0]);
#pragma omp simd reduction(max : maximum)
  for (int64_t i = 0; i < vocab; ++i) {
    const float x = float(logits[i]);
    maximum = x > maximum ? x : maximum;
  }
  double total = 0.0;
  for (int64_t begin = 0; begin < vocab; begin += kPartial) {
    const int64_t end = std::min(vocab, begin + kPartial);
    float sum = 0.0f;
#pragma omp simd reduction(+ : sum)
    for (int64_t i = begin; i < end; ++i) sum += fast_exp(float(logits[i]) - maximum);
    total += double(sum);
  }
  return double(maximum) + std::log(total);
}

}  // namespace

void CpuOps::cross_entropy(Tensor logits_TV, Tensor targets_T, Tensor weights_T, float scale, Tensor loss) {
  const int64_t tokens = logits_TV.rows(), vocab = logits_TV.columns(), chunks = ceil_div(tokens, kChunkRows);
  const int32_t* targets = targets_T.as<int32_t>();
  const float* weights = weights_T.as<float>();
  double* chunk_losses = scratch_.request<double>(chunks);
  with_real(logits_TV.dtype, [&]<typename T>(T) {
    const Rows<T> rows(logits_TV);
    parallel_tasks(chunks, 4 * kChunkRows * vocab, [&](int64_t chunk) {
      double sum = 0.0;
      for (int64_t t = chunk * kChunkRows; t < std::min(tokens, (chunk + 1) * kChunkRows); ++t) {
        T* logits = rows[t];
        if (weights[t] == 0.0f) {
          if (scale != 0.0f) std::fill_n(logits, vocab, T(0.0f));
          continue;
        }
        const double lse = log_sum_exp(logits, vocab);
        const float target_logit = float(logits[targets[t]]);
        sum += double(weights[t]) * (lse - double(target_logit));
        if (scale == 0.0f) continue;
        const float factor = scale * weights[t], row_lse = float(lse);
#pragma omp simd
        for (int64_t i = 0; i < vocab; ++i) store(logits[i], factor * fast_exp(float(logits[i]) - row_lse));
        logits[targets[t]] = T(factor * (fast_exp(target_logit - row_lse) - 1.0f));
      }
      chunk_losses[chunk] = sum;
    });
  });
  double& total = *loss.as<double>();
  for (int64_t chunk = 0; chunk < chunks; ++chunk) total += chunk_losses[chunk];
}

}  // namespace optimus::cpu
