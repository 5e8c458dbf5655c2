// The dry backend's account of routed rows: balanced experts are counted, not the capacity of the buffers.
#include "optimus/ops/dry/dry_ops.h"

#include <gtest/gtest.h>

#include "optimus/tensor/device.h"

namespace optimus {
namespace {

constexpr int64_t kTokens = 12, kTopK = 2, kExperts = 3, kHidden = 8, kWidth = 5, kCapacity = 30;

class DryOpsTest : public ::testing::Test {
 protected:
  RouteIndex index(double balanced_rows, int64_t capacity = kCapacity) {
    return {make(DType::i32, {kExperts + 1}), make(DType::i32, {capacity}), make(DType::i32, {capacity}),
            make(DType::i32, {kTokens + 1}),  make(DType::i32, {capacity}), balanced_rows};
  }
  Tensor make(DType dtype, Shape shape) { return arena_.allocate(dtype, shape, "test"); }
  Tensor rows(int64_t columns, int64_t capacity = kCapacity) { return make(DType::bf16, {capacity, columns}); }
  void expect(double flops, double bytes) {
    ASSERT_EQ(ops_.records().size(), 1u);
    EXPECT_DOUBLE_EQ(ops_.records()[0].flops, flops) << ops_.records()[0].op;
    EXPECT_DOUBLE_EQ(ops_.records()[0].bytes, bytes) << ops_.records()[0].op;
    ops_.clear();
  }

  std::unique_ptr<Device> device_ = make_dry_device(DeviceKind::cpu);
  Arena arena_{*device_, "test", -1};
  DryOps ops_;
};

TEST_F(DryOpsTest, GroupedProductsCountBalancedRows) {
  const RouteIndex balanced = index(24);
  const Tensor x = rows(kHidden), y = rows(kWidth), w = make(DType::bf16, {kExperts, kWidth, kHidden});
  const double flops = 2.0 * 24 * kHidden * kWidth, row_bytes = 24 * 2.0 * (kHidden + kWidth);
  ops_.grouped_matmul(x, w, balanced, y);
  expect(flops, row_bytes + double(w.bytes()));
  ops_.grouped_matmul_input(y, w, balanced, x);
  expect(flops, row_bytes + double(w.bytes()));
  ops_.grouped_matmul_weight(y, x, balanced, w, Write::overwrite);
  expect(flops, row_bytes + double(w.bytes()));
  ops_.grouped_matmul_weight(y, x, balanced, w, Write::accumulate);
  expect(flops, row_bytes + 2.0 * double(w.bytes()));
}

// A wave behind the balanced rows costs its index, and zeros where a gradient is overwritten.
TEST_F(DryOpsTest, EmptyWavesCostNothing) {
  for (int64_t capacity : {kCapacity, int64_t{0}}) {
    const RouteIndex empty = index(0, capacity);
    const Tensor x = rows(kHidden, capacity), y = rows(kWidth, capacity);
    const Tensor w = make(DType::bf16, {kExperts, kWidth, kHidden}), tokens = make(DType::bf16, {kTokens, kHidden});
    ops_.grouped_matmul(x, w, empty, y);
    expect(0, 0);
    ops_.grouped_matmul_input(y, w, empty, x);
    expect(0, 0);
    ops_.grouped_matmul_weight(y, x, empty, w, Write::accumulate);
    expect(0, 0);
    ops_.grouped_matmul_weight(y, x, empty, w, Write::overwrite);
    expect(0, double(w.bytes()));
    ops_.gather_rows(tokens, empty, x);
    expect(0, 0);
    ops_.combine_rows(x, empty, tokens, tokens);
    expect(0, 0);
  }
}

TEST_F(DryOpsTest, DispatchCountsBalancedRows) {
  const RouteIndex balanced = index(24), few = index(4);
  const Tensor ids = make(DType::i32, {kTokens, kTopK}), x = make(DType::bf16, {kTokens, kHidden});
  const Tensor y = make(DType::bf16, {kTokens, kHidden}), routed = rows(kHidden);
  const double row = 2.0 * kHidden, ids_bytes = 4.0 * (kTokens * kTopK + kTokens + 1);
  ops_.route(ids, 0, 0, balanced);
  expect(0, ids_bytes + 3 * 4.0 * 24);
  RouteIndex to_ranks = balanced;
  to_ranks.slot_R = {};
  ops_.route_to_ranks(ids, 1, to_ranks);
  expect(0, ids_bytes + 2 * 4.0 * 24);
  ops_.gather_rows(x, balanced, routed);
  expect(0, 24 * (4 + 2 * row));
  ops_.combine_rows(routed, balanced, x, y);
  expect(0, 24 * (4 + row) + kTokens * 2 * row);
  ops_.combine_rows(routed, balanced, {}, y);
  expect(0, 24 * (4 + row) + kTokens * row);
  ops_.combine_rows(routed, few, y, y);  // at most four tokens have rows
  expect(0, 4 * (4 + row) + 4 * 2 * row);
}

}  // namespace
}  // namespace optimus
