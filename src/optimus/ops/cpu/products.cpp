#include "optimus/ops/cpu/products.h"

#include <algorithm>
#include <vector>

#include "optimus/ops/cpu/parallel.h"

namespace optimus::cpu {
namespace {

// A tile is about a sixteenth of the whole work, within bounds: smaller ones lose time packing operands again, larger
// ones leave threads idle at the end. Measured on two Sapphire Rapids cores.
constexpr double kLeastTileFlops = 3e6;
constexpr double kMostTileFlops = 60e6;
constexpr double kTilesWanted = 16;
constexpr int64_t kLeastTileRows = 64;
constexpr int64_t kTileStep = 16;

double flops_of(const Product& p) { return 2.0 * double(p.m) * double(p.n) * double(p.k); }

const float* offset(const void* base, int64_t elements) { return static_cast<const float*>(base) + elements; }

/// The part of `p` at rows [row, row + rows) and columns [column, column + columns) of its result.
Product tile_of(const Product& p, int64_t row, int64_t rows, int64_t column, int64_t columns) {
  Product tile = p;
  tile.m = rows;
  tile.n = columns;
  tile.a = offset(p.a, p.ta == Transpose::no ? row * p.lda : row);
  tile.b = offset(p.b, p.tb == Transpose::no ? column : column * p.ldb);
  tile.c = static_cast<float*>(p.c) + row * p.ldc + column;
  return tile;
}

/// Halves the longer side until a tile has at most `most_flops`.
void append_tiles(const Product& p, double most_flops, std::vector<Product>& tiles) {
  int64_t row_tiles = 1, column_tiles = 1;
  const auto side = [](int64_t size, int64_t parts) { return ceil_div(ceil_div(size, parts), kTileStep) * kTileStep; };
  for (;;) {
    const int64_t rows = side(p.m, row_tiles), columns = side(p.n, column_tiles);
    const int64_t longer = std::max(rows, columns);
    if (2.0 * double(rows) * double(columns) * double(p.k) <= most_flops || longer <= kLeastTileRows) break;
    (rows >= columns ? row_tiles : column_tiles) *= 2;
  }
  const int64_t rows = side(p.m, row_tiles), columns = side(p.n, column_tiles);
  for (int64_t row = 0; row < p.m; row += rows) {
    for (int64_t column = 0; column < p.n; column += columns) {
      tiles.push_back(tile_of(p, row, std::min(rows, p.m - row), column, std::min(columns, p.n - column)));
    }
  }
}

}  // namespace

void run_products(std::span<const Product> products) {
  double flops = 0;
  for (const Product& p : products) flops += flops_of(p);
  const double most_flops = std::clamp(flops / kTilesWanted, kLeastTileFlops, kMostTileFlops);
  std::vector<Product> tiles;
  for (const Product& p : products) append_tiles(p, most_flops, tiles);
  parallel_tasks(int64_t(tiles.size()), kSerialWork, [&](int64_t i) { sgemm(tiles[size_t(i)]); });
}

}  // namespace optimus::cpu
