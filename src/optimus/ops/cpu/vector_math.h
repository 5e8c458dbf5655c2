// Functions that g++ turns into vector code inside `#pragma omp simd` loops without -ffast-math.
//
// exp(x) = 2^n * e^r with n = round(x / ln 2), r = x - n ln 2 in [-ln 2 / 2, ln 2 / 2], e^r by its Taylor polynomial of
// degree 7 (relative error below 2^-24 there); within 2 units in the last place. Results that would be subnormal are 0,
// since the processor takes a hundred cycles for each subnormal number.
#pragma once

#include <bit>
#include <cmath>
#include <cstdint>

namespace optimus::cpu {

/// e^x: 0 below -87.33 (-inf included), inf above 88.73, NaN for NaN.
inline float fast_exp(float x) {
  constexpr float kRound = 0x1.8p23f;  // adding it leaves round(x) in the low bits
  constexpr float kLeast = -87.33f;    // e^x is the smallest normal number
  const bool vanishes = x < kLeast;
  x = vanishes ? kLeast : x;  // written so that NaN stays
  x = x > 89.0f ? 89.0f : x;  // e^89 rounds to inf
  const float shifted = std::fma(x, 0x1.715476p+0f, kRound);
  const float n = shifted - kRound;
  float r = std::fma(n, -0x1.62e4p-1f, x);  // ln 2 in two parts, the first exact when multiplied by n
  r = std::fma(n, -0x1.7f7d1cp-20f, r);
  float p = 0x1.a01a02p-13f;
  p = std::fma(p, r, 0x1.6c16c2p-10f);
  p = std::fma(p, r, 0x1.111112p-7f);
  p = std::fma(p, r, 0x1.555556p-5f);
  p = std::fma(p, r, 0x1.555556p-3f);
  p = std::fma(p, r, 0.5f);
  p = std::fma(p, r, 1.0f);
  p = std::fma(p, r, 1.0f);
  // 2^n in two factors, since n may be above the largest exponent.
  const int32_t exponent = std::bit_cast<int32_t>(shifted) - std::bit_cast<int32_t>(kRound);
  const int32_t half = exponent >> 1;
  const float scale_low = std::bit_cast<float>(uint32_t(half + 127) << 23);
  const float scale_high = std::bit_cast<float>(uint32_t(exponent - half + 127) << 23);
  return vanishes ? 0.0f : p * scale_low * scale_high;
}

inline float sigmoid(float x) { return 1.0f / (1.0f + fast_exp(-x)); }

}  // namespace optimus::cpu
