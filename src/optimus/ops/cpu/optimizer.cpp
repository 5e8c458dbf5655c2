// The global norm, the values every parameter's update shares, and AdamW. The maths is in ops.h.
#include <cmath>

#include "optimus/ops/cpu/cpu_ops.h"

namespace optimus::cpu {

void CpuOps::sum_squares(Tensor x, Tensor out) {
  constexpr int64_t kChunk = 16 * 1024;
  const int64_t count = x.elements(), chunks = ceil_div(count, kChunk);
  double* partials = scratch_.request<double>(chunks);
  with_real(x.dtype, [&]<typename T>(T) {
    const T* values = x.as<T>();
    parallel_ranges(chunks, kChunk, [&](int64_t begin, int64_t end) {
      for (int64_t chunk = begin; chunk < end; ++chunk) {
        const T* chunk_values = values + chunk * kChunk;
        const int64_t chunk_count = std::min(kChunk, count - chunk * kChunk);
        double sum = 0.0;
#pragma omp simd reduction(+ : sum)
        for (int64_t i = 0; i < chunk_count; ++i) {
          const double value = double(float(chunk_values[i]));
          sum += value * value;
        }
        partials[chunk] = sum;
      }
    });
  });
  double& total = *out.as<double>();
  for (int64_t chunk = 0; chunk < chunks; ++chunk) total += partials[chunk];
}

void CpuOps::clip_control(Tensor squares, Tensor loss, float clip_norm, Tensor control) {
  const double sum = *squares.as<double>(), norm = std::sqrt(sum);
  float* out = control.as<float>();
  out[kGradientNorm] = float(norm);
  out[kClip] = clip_norm > 0.0f ? float(std::min(1.0, double(clip_norm) / (norm + 1e-6))) : 1.0f;
  out[kFinite] = std::isfinite(sum) && std::isfinite(*loss.as<double>()) ? 1.0f : 0.0f;
}

void CpuOps::adamw(const AdamwConstants& constants, Tensor control, Tensor gradient, Tensor master, Tensor m, Tensor v,
                   Tensor weight) {
  constexpr int64_t kWorkEach = 4;
  expects(m.dtype == v.dtype, "adamw: moments in {} and {}", name_of(m.dtype), name_of(v.dtype));
  const float* shared = control.as<float>();
  if (shared[kFinite] == 0.0f) return;
  const float clip = shared[kClip], keep = 1.0f - shared[kLearningRate] * constants.weight_decay;
  const float step = shared[kLearningRate] / shared[kCorrection1];
  const float inverse_correction2 = 1.0f / shared[kCorrection2];
  const float beta1 = constants.beta1, beta2 = constants.beta2, eps = constants.eps;

  const auto update_all = [&]<typename G, typename M, typename W>(const G* gradients, M* first_moments,
                                                                  M* second_moments, W* weights) {
    float* masters = master.as<float>();
    const bool aliased = weight.data == master.data;
    parallel_ranges(master.elements(), kWorkEach, [=](int64_t begin, int64_t end) {
      const auto update = [=](int64_t i) {
        const float g = clip * float(gradients[i]);
        const float first = beta1 * float(first_moments[i]) + (1.0f - beta1) * g;
        const float second = beta2 * float(second_moments[i]) + (1.0f - beta2) * g * g;
        store(first_moments[i], first);
        store(second_moments[i], second);
        masters[i] = masters[i] * keep - step * first / (std::sqrt(second * inverse_correction2) + eps);
      };
      if (aliased) {
#pragma omp simd
        for (int64_t i = begin; i < end; ++i) update(i);
      } else {
#pragma omp simd
        for (int64_t i = begin; i < end; ++i) {
          update(i);
          store(weights[i], masters[i]);
        }
      }
    });
  };
  with_real(gradient.dtype, [&]<typename G>(G) {
    with_real(m.dtype, [&]<typename M>(M) {
      with_real(weight.dtype,
                [&]<typename W>(W) { update_all(gradient.as<G>(), m.as<M>(), v.as<M>(), weight.as<W>()); });
    });
  });
}

}  // namespace optimus::cpu
