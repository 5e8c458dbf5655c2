#include "optimus/data/permutation.h"

#include <bit>

#include "optimus/base/error.h"

namespace optimus {
namespace {

/// Four rounds are enough for large domains; small ones, whose halves have few bits, want more.
constexpr uint64_t kRounds = 8;

}  // namespace

Permutation::Permutation(int64_t size, const Philox& generator, uint64_t stream)
    : size_(uint64_t(size)), generator_(generator), stream_(stream) {
  expects(size >= 1, "a permutation of {} items", size);
  half_bits_ = (std::bit_width(size_ - 1) + 1) / 2;
  half_mask_ = (uint64_t{1} << half_bits_) - 1;
}

uint64_t Permutation::encrypt(uint64_t value) const {
  uint64_t left = value >> half_bits_, right = value & half_mask_;
  for (uint64_t round = 0; round < kRounds; ++round) {
    uint32_t words[4];
    generator_(round << 32 | right, stream_, words);
    const uint64_t mixed = left ^ (words[0] & half_mask_);
    left = right;
    right = mixed;
  }
  return left << half_bits_ | right;
}

int64_t Permutation::operator()(int64_t i) const {
  expects(i >= 0 && uint64_t(i) < size_, "item {} of a permutation of {}", i, size_);
  uint64_t value = uint64_t(i);
  do value = encrypt(value);
  while (value >= size_);
  return int64_t(value);
}

}  // namespace optimus
