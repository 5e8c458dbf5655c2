// f32 products cut into tiles that the threads take one by one. oneDNN runs each tile on one thread, which on a busy
// machine is faster than its own split into equal shares, and products of many small matrices need one parallel region.
#pragma once

#include <span>

#include "optimus/ops/cpu/onednn.h"

namespace optimus::cpu {

/// All the products; they must not overlap in their results. Tiles depend on the products' sizes only, and every
/// element is summed over k by one tile, so the result does not depend on scheduling.
void run_products(std::span<const Product> products);

}  // namespace optimus::cpu
