// Element types and the bf16 conversion used everywhere on the host.
#pragma once

#include <bit>
#include <cstdint>
#include <string_view>

#include "optimus/base/error.h"

namespace optimus {

enum class DType : uint8_t { f32, bf16, f64, i16, i32, i64 };

constexpr int64_t size_of(DType dtype) {
  switch (dtype) {
    case DType::f32:
    case DType::i32: return 4;
    case DType::bf16:
    case DType::i16: return 2;
    case DType::f64:
    case DType::i64: return 8;
  }
  return 0;
}

constexpr std::string_view name_of(DType dtype) {
  switch (dtype) {
    case DType::f32: return "f32";
    case DType::bf16: return "bf16";
    case DType::f64: return "f64";
    case DType::i16: return "i16";
    case DType::i32: return "i32";
    case DType::i64: return "i64";
  }
  return "?";
}

/// bfloat16: the upper half of an IEEE float. Conversion rounds to nearest even and keeps NaN a NaN.
struct bf16 {
  uint16_t bits = 0;

  bf16() = default;
  explicit bf16(float value) : bits(rounded_bits(value)) {}
  explicit operator float() const { return std::bit_cast<float>(uint32_t(bits) << 16); }

  static uint16_t rounded_bits(float value) {
    const uint32_t word = std::bit_cast<uint32_t>(value);
    const uint32_t rounded = (word + 0x7FFFu + ((word >> 16) & 1u)) >> 16;
    const uint32_t quiet_nan = (word >> 16) | 0x40u;
    return uint16_t((word & 0x7FFFFFFFu) > 0x7F800000u ? quiet_nan : rounded);
  }
};

template <typename T>
constexpr DType dtype_of();
template <>
constexpr DType dtype_of<float>() {
  return DType::f32;
}
template <>
constexpr DType dtype_of<bf16>() {
  return DType::bf16;
}
template <>
constexpr DType dtype_of<double>() {
  return DType::f64;
}
template <>
constexpr DType dtype_of<int16_t>() {
  return DType::i16;
}
template <>
constexpr DType dtype_of<int32_t>() {
  return DType::i32;
}
template <>
constexpr DType dtype_of<int64_t>() {
  return DType::i64;
}

}  // namespace optimus
