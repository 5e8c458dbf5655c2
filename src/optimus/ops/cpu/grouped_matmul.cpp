// Products of rows grouped by expert with each expert's matrix, and their two gradients. N, K are the rows and columns
// of an expert's weight, rows(e) = [offsets[e], offsets[e+1]):
//   forward  y[rows(e)]  = x[rows(e)] w[e]^T        input  dx[rows(e)] = dy[rows(e)] w[e]
//   weight   dw[e] (+)= dy[rows(e)]^T x[rows(e)]
//
// In f32 all experts' products are tiles of one parallel region. In bf16 a primitive serves one number of rows, and the
// number of rows of an expert is anything, so rows are cut into pieces of 512, 256, ... 1: ten primitives a shape.
#include <vector>

#include "optimus/ops/cpu/cpu_ops.h"
#include "optimus/ops/cpu/products.h"

namespace optimus::cpu {
namespace {

constexpr int64_t kLargestPiece = 512;

/// The rows of every expert, and whether the operand types can be multiplied as they are.
struct Groups {
  explicit Groups(const Tensor& offsets_L1) : offsets(offsets_L1.as<int32_t>()), experts(offsets_L1.elements() - 1) {}
  int64_t begin(int64_t e) const { return offsets[e]; }
  int64_t rows(int64_t e) const { return offsets[e + 1] - offsets[e]; }
  int64_t total() const { return offsets[experts]; }

  const int32_t* offsets;
  int64_t experts;
};

Tensor contiguous_f32(float* data, Shape shape) { return Tensor(data, DType::f32, shape); }

/// piece(first row, rows) over [0, rows) in powers of two.
template <typename F>
void for_each_piece(int64_t rows, F&& piece) {
  int64_t size = kLargestPiece;
  for (int64_t row = 0; row < rows; row += size) {
    while (size > rows - row) size /= 2;
    piece(row, size);
  }
}

/// Rows times each expert's matrix, in one type: tw is yes for the forward product, no for the input gradient.
void multiply_rows(const Groups& groups, const Tensor& from, const Tensor& w_LNK, Transpose tw, const Tensor& to,
                   Bf16Products& bf16_products) {
  std::vector<Product> products;
  for (int64_t e = 0; e < groups.experts; ++e) {
    const int64_t begin = groups.begin(e);
    const std::byte* weight = w_LNK.at_row(e * w_LNK.shape[1]);
    const auto product = [&](int64_t row, int64_t rows) {
      return Product{
          Transpose::no, tw,     rows,        to.columns(),           from.columns(), from.at_row(begin + row),
          from.pitch,    weight, w_LNK.pitch, to.at_row(begin + row), to.pitch,       false};
    };
    if (from.dtype == DType::f32) {
      products.push_back(product(0, groups.rows(e)));
    } else {
      for_each_piece(groups.rows(e),
                     [&](int64_t row, int64_t rows) { bf16_products.run(product(row, rows), to.dtype); });
    }
  }
  run_products(products);
}

}  // namespace

void CpuOps::grouped_rows(const Tensor& from, const Tensor& w_LNK, const RouteIndex& index, Transpose tw,
                          const Tensor& to) {
  const Groups groups(index.offsets_L1);
  const int64_t rows = groups.total();
  if (rows == 0 || to.columns() == 0) return;
  expects(w_LNK.shape.rank() == 3 && w_LNK.shape[0] == groups.experts && rows <= from.rows() && rows <= to.rows(),
          "grouped product of {} with {} into {}, {} rows", from.shape, w_LNK.shape, to.shape, rows);
  if (from.dtype == DType::f32 || bf16_products_.available()) {
    return multiply_rows(groups, from, w_LNK, tw, to, bf16_products_);
  }
  float* scratch = product_scratch_.request<float>(rows * (from.columns() + to.columns()) + w_LNK.elements());
  const Tensor from32 = contiguous_f32(scratch, {rows, from.columns()});
  const Tensor to32 = contiguous_f32(scratch + from32.elements(), {rows, to.columns()});
  const Tensor w32 = contiguous_f32(scratch + from32.elements() + to32.elements(), w_LNK.shape);
  copy(from.slice(0, rows), from32);
  copy(w_LNK, w32);
  multiply_rows(groups, from32, w32, tw, to32, bf16_products_);
  copy(to32, to.slice(0, rows));
}

void CpuOps::grouped_matmul(Tensor x_RK, Tensor w_LNK, const RouteIndex& index, Tensor y_RN) {
  grouped_rows(x_RK, w_LNK, index, Transpose::yes, y_RN);
}

void CpuOps::grouped_matmul_input(Tensor dy_RN, Tensor w_LNK, const RouteIndex& index, Tensor dx_RK) {
  grouped_rows(dy_RN, w_LNK, index, Transpose::no, dx_RK);
}

void CpuOps::grouped_matmul_weight(Tensor dy_RN, Tensor x_RK, const RouteIndex& index, Tensor dw_LNK, Write write) {
  const Groups groups(index.offsets_L1);
  const int64_t rows = groups.total(), n = dw_LNK.shape[1], k = dw_LNK.shape[2];
  if (dw_LNK.elements() == 0 || (rows == 0 && write == Write::accumulate)) return;
  expects(dy_RN.columns() == n && x_RK.columns() == k && dw_LNK.shape[0] == groups.experts && rows <= dy_RN.rows() &&
              rows <= x_RK.rows(),
          "grouped weight gradient of {} and {} into {}, {} rows", dy_RN.shape, x_RK.shape, dw_LNK.shape, rows);
  const bool native = x_RK.dtype == DType::f32 || bf16_products_.available();
  const bool round = dw_LNK.dtype != DType::f32;
  float* scratch = product_scratch_.request<float>((native ? 0 : rows * (n + k)) + (round ? dw_LNK.elements() : 0));
  const auto take = [&](Shape shape) {
    const Tensor taken = contiguous_f32(scratch, shape);
    scratch += taken.elements();
    return taken;
  };
  if (!native && rows > 0) {
    const Tensor dy32 = take({rows, n}), x32 = take({rows, k});
    copy(dy_RN.slice(0, rows), dy32);
    copy(x_RK.slice(0, rows), x32);
    dy_RN = dy32;
    x_RK = x32;
  }
  const Tensor sum = round ? take(dw_LNK.shape) : dw_LNK;
  if (round && write == Write::accumulate) copy(dw_LNK, sum);

  std::vector<Product> products;
  for (int64_t e = 0; e < groups.experts; ++e) {
    bool accumulate = write == Write::accumulate;
    const auto product = [&](int64_t row, int64_t count) {
      const int64_t first = groups.begin(e) + row;
      return Product{Transpose::yes, Transpose::no,       n,           k,
                     count,          dy_RN.at_row(first), dy_RN.pitch, x_RK.at_row(first),
                     x_RK.pitch,     sum.at_row(e * n),   sum.pitch,   accumulate};
    };
    if (x_RK.dtype == DType::f32 || groups.rows(e) == 0) {
      products.push_back(product(0, groups.rows(e)));  // without rows: zeros, or nothing when accumulating
    } else {
      for_each_piece(groups.rows(e), [&](int64_t row, int64_t count) {
        bf16_products_.run(product(row, count), DType::f32);
        accumulate = true;
      });
    }
  }
  run_products(products);
  if (round) copy(sum, dw_LNK);
}

}  // namespace optimus::cpu
