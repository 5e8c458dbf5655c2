// The sum that makes a collective's result depend on its group only: rank 0's value, plus rank 1's, plus rank 2's, ...,
// element by element, however the elements are cut into pieces and whatever arrives first.
#pragma once

#include <span>

#include "optimus/tensor/dtype.h"

namespace optimus {

/// out[i] = sum over r, in order, of pieces[r][i], for i < count. f32 is added in f32, bf16 in f32 and rounded once, f64
/// and i32 in their own type. out may be one of the pieces, and overlaps none of them otherwise.
void sum_in_rank_order(DType dtype, std::span<const void* const> pieces, void* out, int64_t count);

}  // namespace optimus
