// Products of rows grouped by expert: y[r] = x[r] W[e(r)]^T, its input gradient and its weight gradient.
#include <fmt/ranges.h>

#include "support/backends.h"
#include "support/reference.h"

namespace optimus::test {
namespace {

using GroupedMatmulTest = OpsTest;
OPTIMUS_ON_EVERY_BACKEND(GroupedMatmulTest);

constexpr int64_t kSpareRows = 5;  // the buffers hold more rows than the experts were sent

Indices offsets_of(const Indices& counts) {
  Indices offsets{0};
  for (int64_t count : counts) offsets.push_back(offsets.back() + count);
  return offsets;
}

/// Rows for the experts, then spare ones that hold NaN: whoever reads them shows it.
Values with_spare_rows(Values rows, int64_t spare_rows, int64_t columns) {
  rows.resize(rows.size() + size_t(spare_rows * columns), NAN);
  return rows;
}

/// An index as far as grouped products read it.
RouteIndex index_of(Workspace& w, const Indices& offsets) {
  RouteIndex index;
  index.offsets_L1 = w.indices({int64_t(offsets.size())}, offsets);
  return index;
}

Values routed(const Workspace& w, const Tensor& x, const Indices& offsets) {
  return w.read(x.slice(0, offsets.back()));
}

struct GroupedCase {
  Indices counts;
  int64_t n, k;
  DType type;
  Layout layout = Layout::contiguous;
  int64_t spare_rows = kSpareRows;

  int64_t experts() const { return int64_t(counts.size()); }
  Indices offsets() const { return offsets_of(counts); }
  int64_t capacity() const { return offsets().back() + spare_rows; }
  std::string text() const {
    return fmt::format("rows {} n {} k {} {} {}", fmt::join(counts, " "), n, k, name_of(type),
                       layout == Layout::pitched ? "pitched" : "");
  }
};

void check_forward_and_input(Device& device, Ops& ops, const GroupedCase& c) {
  SCOPED_TRACE(c.text());
  Workspace w(device);
  const Indices offsets = c.offsets();
  const int64_t rows = offsets.back();
  const Values x_values = with_spare_rows(normal_values(rows * c.k, 1), c.spare_rows, c.k);
  const Values dy_values = with_spare_rows(normal_values(rows * c.n, 2), c.spare_rows, c.n);
  const Tensor x = w.input(c.type, {c.capacity(), c.k}, x_values, c.layout);
  const Tensor dy = w.input(c.type, {c.capacity(), c.n}, dy_values, c.layout);
  const Tensor weight = w.input(c.type, {c.experts(), c.n, c.k}, normal_values(c.experts() * c.n * c.k, 3));
  const RouteIndex index = index_of(w, offsets);
  const Tensor y = w.output(c.type, {c.capacity(), c.n}, c.layout),
               dx = w.output(c.type, {c.capacity(), c.k}, c.layout);
  w.run([&] {
    ops.grouped_matmul(x, weight, index, y);
    ops.grouped_matmul_input(dy, weight, index, dx);
  });
  const Values weights = w.read(weight);
  EXPECT_TRUE(close(routed(w, y, offsets), reference::grouped_matmul(routed(w, x, offsets), weights, offsets, c.n, c.k),
                    tolerance_of(c.type)))
      << "y";
  EXPECT_TRUE(close(routed(w, dx, offsets),
                    reference::grouped_matmul_input(routed(w, dy, offsets), weights, offsets, c.n, c.k),
                    tolerance_of(c.type)))
      << "dx";
  EXPECT_TRUE(w.untouched(y.slice(rows, c.spare_rows))) << "y past the last expert's rows";
  EXPECT_TRUE(w.untouched(dx.slice(rows, c.spare_rows))) << "dx past the last expert's rows";
}

void check_weight(Device& device, Ops& ops, const GroupedCase& c, DType gradient, Write write) {
  SCOPED_TRACE(c.text() + fmt::format(" gradient {} {}", name_of(gradient), int(write)));
  Workspace w(device);
  const Indices offsets = c.offsets();
  const int64_t rows = offsets.back(), size = c.experts() * c.n * c.k;
  const Values x_values = with_spare_rows(normal_values(rows * c.k, 1), c.spare_rows, c.k);
  const Values dy_values = with_spare_rows(normal_values(rows * c.n, 2), c.spare_rows, c.n);
  const Tensor x = w.input(c.type, {c.capacity(), c.k}, x_values, c.layout);
  const Tensor dy = w.input(c.type, {c.capacity(), c.n}, dy_values, c.layout);
  const RouteIndex index = index_of(w, offsets);
  const Shape shape{c.experts(), c.n, c.k};
  const Tensor dw =
      write == Write::overwrite ? w.output(gradient, shape) : w.in_out(gradient, shape, normal_values(size, 4));
  Values expected = reference::grouped_matmul_weight(routed(w, dy, offsets), routed(w, x, offsets), offsets, c.n, c.k);
  if (write == Write::accumulate) expected = reference::sum(expected, w.read(dw));
  w.run([&] { ops.grouped_matmul_weight(dy, x, index, dw, write); });
  EXPECT_TRUE(close(w.read(dw), expected, tolerance_of(gradient)));
  for (int64_t e = 0; e < c.experts(); ++e) {  // an expert's small gradient must not hide behind a large one's
    const Values one(expected.begin() + e * c.n * c.k, expected.begin() + (e + 1) * c.n * c.k);
    EXPECT_TRUE(close(w.read(dw[e]), one, tolerance_of(gradient))) << "expert " << e;
  }
}

void check_all(Device& device, Ops& ops, const GroupedCase& c) {
  check_forward_and_input(device, ops, c);
  for (Write write : {Write::overwrite, Write::accumulate}) {
    check_weight(device, ops, c, DType::f32, write);
    if (c.type == DType::bf16) check_weight(device, ops, c, DType::bf16, write);
  }
}

TEST_P(GroupedMatmulTest, EmptyExpertsAnywhere) {
  const std::vector<Indices> table = {{3},          {0},          {0, 0, 0},      {0, 4, 9},
                                      {4, 9, 0},    {0, 0, 7, 0}, {7, 0, 0, 0},   {0, 0, 0, 7},
                                      {1, 1, 1, 1}, {5, 0, 3, 0}, {16, 8, 24, 32}};
  for (const Indices& counts : table)
    for (DType type : {DType::f32, DType::bf16})
      for (Layout layout : {Layout::contiguous, Layout::pitched})
        check_all(device(), ops(), {counts, 12, 20, type, layout});
}

TEST_P(GroupedMatmulTest, BuffersWithoutRows) {
  for (const Indices& counts : std::vector<Indices>{{0}, {0, 0, 0}})
    for (DType type : {DType::f32, DType::bf16})
      for (Layout layout : {Layout::contiguous, Layout::pitched})
        check_all(device(), ops(), {counts, 12, 20, type, layout, 0});
}

TEST_P(GroupedMatmulTest, WildlyUnequalExperts) {
  for (DType type : {DType::f32, DType::bf16}) check_all(device(), ops(), {{162, 0, 2577, 446, 0, 83}, 24, 16, type});
}

TEST_P(GroupedMatmulTest, EveryCountUpTo33) {
  Indices counts(33);
  for (int64_t i = 0; i < 33; ++i) counts[size_t(i)] = (i * 13) % 33 + 1;
  for (DType type : {DType::f32, DType::bf16}) check_all(device(), ops(), {counts, 20, 24, type});
}

// Widths and counts around the tiles of tensor-core kernels, more experts than one looks at at once, and empty ones among
// them.
TEST_P(GroupedMatmulTest, WidthsOfWholeTiles) {
  const std::vector<Indices> table = {{130, 0, 257, 1, 64, 0, 5}, {0, 0, 300}, {0, 0, 0, 0}};
  for (const Indices& counts : table)
    for (const auto& [n, k] : std::vector<std::pair<int64_t, int64_t>>{{64, 64}, {128, 192}, {264, 136}})
      for (Layout layout : {Layout::contiguous, Layout::pitched})
        check_all(device(), ops(), {counts, n, k, DType::bf16, layout});
  Indices many(70);
  for (int64_t i = 0; i < 70; ++i) many[size_t(i)] = i % 3 == 1 ? 0 : (i * 7) % 23;
  check_all(device(), ops(), {many, 72, 64, DType::bf16});
}

TEST_P(GroupedMatmulTest, OddWidths) {
  for (const auto& [n, k] : std::vector<std::pair<int64_t, int64_t>>{{1, 1}, {3, 130}, {65, 7}, {33, 17}})
    for (DType type : {DType::f32, DType::bf16}) check_all(device(), ops(), {{6, 0, 17, 1}, n, k, type});
}

}  // namespace
}  // namespace optimus::test
