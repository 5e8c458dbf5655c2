// Elements between files and memory: F16, BF16 and F32 widen to f32 exactly, f32 narrows with rounding to nearest even
// (so that what was widened narrows back to the same bits).
#pragma once

#include <cstdint>
#include <span>
#include <string_view>

#include "optimus/tensor/dtype.h"

namespace optimus {

/// F32, BF16 and F16: the types that weights are exchanged in.
bool is_weight_type(std::string_view dtype);
/// to[i] = f32(from[i]); `from` holds to.size() elements of a weight type, at any alignment.
void widen(std::string_view dtype, const std::byte* from, std::span<float> to);
/// to[i] = dtype(from[i]); `to` has room for from.size() elements of a weight type.
void narrow(std::string_view dtype, std::span<const float> from, std::byte* to);

/// Copies `count` elements, converting between f32 and bf16 where the types differ. Any alignment.
/// Throws std::logic_error for another pair of different types; see convertible().
void convert(DType from_type, const std::byte* from, DType to_type, std::byte* to, int64_t count);
bool convertible(DType from, DType to);

}  // namespace optimus
