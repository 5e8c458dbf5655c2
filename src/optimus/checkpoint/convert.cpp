#include "optimus/checkpoint/convert.h"

#include <cstring>

namespace optimus {
namespace {

/// to[i] = To(float(from[i])), through memcpy because file bytes have no alignment.
template <typename From, typename To>
void convert_each(const std::byte* from, std::byte* to, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    From value;
    std::memcpy(&value, from + i * sizeof(From), sizeof(From));
    const To converted = static_cast<To>(static_cast<float>(value));
    std::memcpy(to + i * sizeof(To), &converted, sizeof(To));
  }
}

}  // namespace

bool is_weight_type(std::string_view dtype) { return dtype == "F32" || dtype == "BF16" || dtype == "F16"; }

void widen(std::string_view dtype, const std::byte* from, std::span<float> to) {
  std::byte* out = reinterpret_cast<std::byte*>(to.data());
  if (dtype == "F32") std::memcpy(out, from, to.size_bytes());
  else if (dtype == "BF16") convert_each<bf16, float>(from, out, to.size());
  else if (dtype == "F16") convert_each<_Float16, float>(from, out, to.size());
  else expects(false, "widen: {} is not a weight type", dtype);
}

void narrow(std::string_view dtype, std::span<const float> from, std::byte* to) {
  const std::byte* in = reinterpret_cast<const std::byte*>(from.data());
  if (dtype == "F32") std::memcpy(to, in, from.size_bytes());
  else if (dtype == "BF16") convert_each<float, bf16>(in, to, from.size());
  else if (dtype == "F16") convert_each<float, _Float16>(in, to, from.size());
  else expects(false, "narrow: {} is not a weight type", dtype);
}

bool convertible(DType from, DType to) {
  const auto real = [](DType dtype) { return dtype == DType::f32 || dtype == DType::bf16; };
  return from == to || (real(from) && real(to));
}

void convert(DType from_type, const std::byte* from, DType to_type, std::byte* to, int64_t count) {
  expects(convertible(from_type, to_type), "convert: {} to {}", name_of(from_type), name_of(to_type));
  if (from_type == to_type) std::memcpy(to, from, size_t(count * size_of(from_type)));
  else if (from_type == DType::bf16) convert_each<bf16, float>(from, to, size_t(count));
  else convert_each<float, bf16>(from, to, size_t(count));
}

}  // namespace optimus
