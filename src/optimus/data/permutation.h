// A pseudo-random permutation of [0, size) that is computed, not stored: a Feistel network over the next power of four,
//
//   (left, right) -> (right, left ^ F(round, right)),   F = Philox keyed by seed and purpose,
//
// is a bijection whatever F is; walking on from a value outside [0, size) until one is inside makes it a bijection of
// [0, size) ("cycle walking", Black and Rogaway, CT-RSA 2002). The domain is less than four times the size, so fewer
// than four steps are expected.
#pragma once

#include <cstdint>

#include "optimus/base/philox.h"

namespace optimus {

class Permutation {
 public:
  /// Every `stream` (an epoch, say) of a generator is another permutation. size >= 1.
  Permutation(int64_t size, const Philox& generator, uint64_t stream);

  /// The image of i in [0, size).
  int64_t operator()(int64_t i) const;

 private:
  uint64_t encrypt(uint64_t value) const;

  uint64_t size_;
  Philox generator_;
  uint64_t stream_;
  int half_bits_;
  uint64_t half_mask_;
};

}  // namespace optimus
