// The global norm, the values every parameter's update shares, split masters and AdamW. The maths is in ops.h.
#include <bit>
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

// ---- split masters ----

namespace {

float joined(uint16_t weight, int16_t remainder) {
  return std::bit_cast<float>((uint32_t(weight) << 16) + uint32_t(int32_t(remainder)));
}
uint16_t weight_bits(float master) { return uint16_t((std::bit_cast<uint32_t>(master) + 0x8000u) >> 16); }
/// The lower half of bits - (weight << 16), which is that of bits.
int16_t remainder_of(float master) { return int16_t(uint16_t(std::bit_cast<uint32_t>(master))); }

}  // namespace

void CpuOps::split_master(Tensor master, Tensor weight, Tensor remainder) {
  const float* masters = master.as<float>();
  bf16* weights = weight.as<bf16>();
  int16_t* remainders = remainder.as<int16_t>();
  parallel_ranges(master.elements(), 1, [=](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) {
      weights[i].bits = weight_bits(masters[i]);
      remainders[i] = remainder_of(masters[i]);
    }
  });
}

void CpuOps::join_master(Tensor weight, Tensor remainder, Tensor master) {
  const bf16* weights = weight.as<bf16>();
  const int16_t* remainders = remainder.as<int16_t>();
  float* masters = master.as<float>();
  parallel_ranges(master.elements(), 1, [=](int64_t begin, int64_t end) {
#pragma omp simd
    for (int64_t i = begin; i < end; ++i) masters[i] = joined(weights[i].bits, remainders[i]);
  });
}

// ---- AdamW ----

namespace {

constexpr int64_t kPiece = 256;  // elements whose random words are made at once

/// words[i] = word (first + i) % 4 of the generator's block (first + i) / 4, for `count` <= kPiece numbers.
void random_words(const Philox& generator, uint64_t step, uint64_t first, int64_t count, uint32_t* words) {
  uint32_t blocks[kPiece + 8];
  const uint64_t first_block = first / 4, past = (first + uint64_t(count) + 3) / 4;
  for (uint64_t block = first_block; block < past; ++block) generator(block, step, blocks + 4 * (block - first_block));
  std::copy_n(blocks + first % 4, count, words);
}

/// Rounded to one of its neighbours by 16 random bits.
uint16_t stochastic_bits(float value, uint32_t random) {
  return uint16_t((std::bit_cast<uint32_t>(value) + (random & 0xFFFFu)) >> 16);
}

}  // namespace

void CpuOps::adamw(const AdamwConstants& constants, Tensor control, Tensor gradient, Tensor master, Tensor m, Tensor v,
                   Tensor weight) {
  expects(m.dtype == v.dtype, "adamw: moments in {} and {}", name_of(m.dtype), name_of(v.dtype));
  expects(weight.dtype == DType::bf16 ? master.dtype == DType::i16 : master.data == weight.data,
          "adamw: a weight in {} with a master in {}", name_of(weight.dtype), name_of(master.dtype));
  const float* shared = control.as<float>();
  if (shared[kFinite] == 0.0f) return;
  const float clip = shared[kClip], keep = 1.0f - shared[kLearningRate] * constants.weight_decay;
  const float step = shared[kLearningRate] / shared[kCorrection1];
  const float inverse_correction2 = 1.0f / shared[kCorrection2];
  const float beta1 = constants.beta1, beta2 = constants.beta2, eps = constants.eps;

  const auto update_all = [&]<typename G, typename M, typename W>(const G* gradients, M* first_moments,
                                                                  M* second_moments, W* weights) {
    constexpr bool kStochastic = std::is_same_v<M, bf16>, kSplit = std::is_same_v<W, bf16>;
    int16_t* remainders = nullptr;
    if constexpr (kSplit) remainders = master.as<int16_t>();
    const auto update = [=](int64_t i, [[maybe_unused]] uint32_t random) {
      const float g = clip * float(gradients[i]);
      const float first = beta1 * float(first_moments[i]) + (1.0f - beta1) * g;
      const float second = beta2 * float(second_moments[i]) + (1.0f - beta2) * g * g;
      if constexpr (kStochastic) {
        first_moments[i].bits = stochastic_bits(first, random);
        second_moments[i].bits = stochastic_bits(second, random >> 16);
      } else {
        first_moments[i] = first;
        second_moments[i] = second;
      }
      const float change = step * first / (std::sqrt(second * inverse_correction2) + eps);
      if constexpr (kSplit) {
        const float value = joined(weights[i].bits, remainders[i]) * keep - change;
        weights[i].bits = weight_bits(value);
        remainders[i] = remainder_of(value);
      } else {
        weights[i] = weights[i] * keep - change;
      }
    };
    constexpr int64_t kWorkEach = kStochastic ? 16 : 4;
    parallel_ranges(weight.elements(), kWorkEach, [=, &constants](int64_t begin, int64_t end) {
      if constexpr (kStochastic) {
        uint32_t words[kPiece];
        for (int64_t piece = begin; piece < end; piece += kPiece) {
          const int64_t count = std::min(kPiece, end - piece);
          random_words(constants.rounding, constants.step, uint64_t(constants.first_index + piece), count, words);
#pragma omp simd
          for (int64_t i = 0; i < count; ++i) update(piece + i, words[i]);
        }
      } else {
#pragma omp simd
        for (int64_t i = begin; i < end; ++i) update(i, 0);
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
