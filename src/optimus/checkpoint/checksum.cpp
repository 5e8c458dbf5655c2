#include "optimus/checkpoint/checksum.h"

#include <fmt/format.h>

// g++ 12 takes the undefined operand inside its own AVX-512 intrinsics for a mistake (GCC bug 105593).
#pragma GCC diagnostic ignored "-Wuninitialized"
#pragma GCC diagnostic ignored "-Wmaybe-uninitialized"
#define XXH_INLINE_ALL
#include <xxhash.h>

namespace optimus {

struct Checksum::State {
  XXH3_state_t xxh3;
};

void Checksum::Free::operator()(State* state) const { delete state; }

Checksum::Checksum() : state_(new State) { XXH3_64bits_reset(&state_->xxh3); }

void Checksum::add(std::span<const std::byte> bytes) { XXH3_64bits_update(&state_->xxh3, bytes.data(), bytes.size()); }

std::string Checksum::hex() const { return fmt::format("{:016x}", XXH3_64bits_digest(&state_->xxh3)); }

std::string checksum_of(std::span<const std::byte> bytes) {
  return fmt::format("{:016x}", XXH3_64bits(bytes.data(), bytes.size()));
}

}  // namespace optimus
