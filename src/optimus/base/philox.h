// Philox4x32-10 (Salmon et al., "Parallel random numbers: as easy as 1, 2, 3", SC'11): random numbers as a pure
// function of (key, counter). Every use keys it by seed and purpose and counts by a global index, so a value depends
// neither on the layout nor on what was drawn before it.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <string_view>

#if defined(__CUDACC__)
#define OPTIMUS_HOST_DEVICE __host__ __device__
#else
#define OPTIMUS_HOST_DEVICE
#endif

namespace optimus {

struct Philox {
  uint32_t key0, key1;

  /// Four random words for a 128-bit counter.
  OPTIMUS_HOST_DEVICE void operator()(uint64_t counter_low, uint64_t counter_high, uint32_t out[4]) const {
    uint32_t c0 = uint32_t(counter_low), c1 = uint32_t(counter_low >> 32);
    uint32_t c2 = uint32_t(counter_high), c3 = uint32_t(counter_high >> 32);
    uint32_t k0 = key0, k1 = key1;
    for (int round = 0; round < 10; ++round) {
      const uint64_t p0 = uint64_t(0xD2511F53u) * c0;
      const uint64_t p1 = uint64_t(0xCD9E8D57u) * c2;
      const uint32_t n0 = uint32_t(p1 >> 32) ^ c1 ^ k0;
      const uint32_t n2 = uint32_t(p0 >> 32) ^ c3 ^ k1;
      c1 = uint32_t(p1);
      c3 = uint32_t(p0);
      c0 = n0;
      c2 = n2;
      k0 += 0x9E3779B9u;
      k1 += 0xBB67AE85u;
    }
    out[0] = c0, out[1] = c1, out[2] = c2, out[3] = c3;
  }
};

/// FNV-1a: names to numbers, stable over compilers and runs.
constexpr uint64_t hash_name(std::string_view name) {
  uint64_t h = 0xcbf29ce484222325ull;
  for (char ch : name) h = (h ^ uint8_t(ch)) * 0x100000001b3ull;
  return h;
}

/// The generator of one purpose ("init", "shuffle", ...) under one seed.
inline Philox philox_for(uint64_t seed, std::string_view purpose) {
  uint64_t h = seed * 0x9E3779B97F4A7C15ull ^ hash_name(purpose);
  h = (h ^ (h >> 30)) * 0xBF58476D1CE4E5B9ull;  // splitmix64's finaliser: near seeds get far keys
  h = (h ^ (h >> 27)) * 0x94D049BB133111EBull;
  h ^= h >> 31;
  return {uint32_t(h), uint32_t(h >> 32)};
}

/// Uniform in (0, 1), never 0 or 1: the top 23 bits, centred, which is exact in f32.
OPTIMUS_HOST_DEVICE inline float to_uniform(uint32_t word) { return (float(word >> 9) + 0.5f) * 0x1p-23f; }

/// Box-Muller: a standard normal number from two random words.
OPTIMUS_HOST_DEVICE inline float normal_from(uint32_t radius_word, uint32_t angle_word) {
  const double radius = std::sqrt(-2.0 * std::log((double(radius_word) + 0.5) * 0x1p-32));
  return float(radius * std::cos(6.283185307179586 * (double(angle_word) * 0x1p-32)));
}

/// Normal number `index` of a stream, of the two words that belong to it, so that neighbours are independent.
OPTIMUS_HOST_DEVICE inline float normal_at(const Philox& generator, uint64_t index, uint64_t stream) {
  uint32_t words[4];
  generator(index >> 1, stream, words);
  const int pair = int(index & 1) * 2;
  return normal_from(words[pair], words[pair + 1]);
}

}  // namespace optimus
