// Views: slices, columns, reshape, and the bf16 conversion.
#include "optimus/tensor/tensor.h"

#include <cmath>
#include <limits>
#include <numeric>

#include <gtest/gtest.h>

namespace optimus::test {
namespace {

/// Numbers 0, 1, 2, ... under a shape.
struct Counting {
  explicit Counting(Shape shape) : values(size_t(shape.elements())), tensor(values.data(), DType::i32, shape) {
    std::iota(values.begin(), values.end(), 0);
  }
  std::vector<int32_t> values;
  Tensor tensor;
};

std::vector<int32_t> elements(const Tensor& t) {
  std::vector<int32_t> out;
  for (int64_t row = 0; row < t.rows(); ++row)
    for (int64_t column = 0; column < t.columns(); ++column)
      out.push_back(reinterpret_cast<const int32_t*>(t.at_row(row))[column]);
  return out;
}
using Numbers = std::vector<int32_t>;

TEST(TensorView, SlicesOfTheFirstDimension) {
  Counting c({4, 2, 3});
  EXPECT_EQ(elements(c.tensor.slice(1, 2)), (Numbers{6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17}));
  EXPECT_EQ(elements(c.tensor[3]), (Numbers{18, 19, 20, 21, 22, 23}));
  EXPECT_EQ(c.tensor[3].shape, (Shape{2, 3}));
  EXPECT_EQ(elements(c.tensor[3][1]), (Numbers{21, 22, 23}));
  EXPECT_EQ(c.tensor.slice(4, 0).elements(), 0);
  Counting vector({5});
  EXPECT_EQ(elements(vector.tensor.slice(2, 2)), (Numbers{2, 3}));
}

TEST(TensorView, ColumnsKeepThePitch) {
  Counting c({3, 5});
  const Tensor columns = c.tensor.column_slice(1, 2);
  EXPECT_EQ(columns.pitch, 5);
  EXPECT_FALSE(columns.contiguous());
  EXPECT_EQ(elements(columns), (Numbers{1, 2, 6, 7, 11, 12}));
  EXPECT_EQ(elements(columns.slice(1, 2)), (Numbers{6, 7, 11, 12}));
  EXPECT_EQ(elements(columns.column_slice(1, 1)), (Numbers{2, 7, 12}));
  EXPECT_TRUE(columns.slice(1, 1).contiguous());
  Counting cube({2, 2, 4});
  EXPECT_EQ(elements(cube.tensor.column_slice(1, 2)[1]), (Numbers{9, 10, 13, 14}));
}

TEST(TensorView, ReshapeAndMatrix) {
  Counting c({2, 3, 4});
  EXPECT_EQ(c.tensor.matrix().shape, (Shape{6, 4}));
  EXPECT_EQ(elements(c.tensor.reshape({4, 6})[1]), (Numbers{6, 7, 8, 9, 10, 11}));
  EXPECT_EQ(c.tensor.reshape({24}).pitch, 24);
  EXPECT_EQ(c.tensor.column_slice(0, 2).matrix().pitch, 4);
}

TEST(TensorView, BrokenContractsThrow) {
  Counting c({3, 4});
  EXPECT_THROW(c.tensor.slice(2, 2), std::logic_error);
  EXPECT_THROW(c.tensor.slice(-1, 1), std::logic_error);
  EXPECT_THROW(c.tensor[3], std::logic_error);
  EXPECT_THROW(c.tensor.column_slice(3, 2), std::logic_error);
  EXPECT_THROW(c.tensor.column_slice(0, 2).reshape({6}), std::logic_error);
  EXPECT_THROW(c.tensor.reshape({5}), std::logic_error);
  EXPECT_THROW(c.tensor.as<float>(), std::logic_error);
  EXPECT_THROW((Shape{1, 1, 1, 1, 1}), std::logic_error);
}

TEST(TensorView, EmptyAndSameView) {
  EXPECT_FALSE(Tensor());
  Counting c({3, 4});
  EXPECT_TRUE(c.tensor.same_view(c.tensor.slice(0, 3)));
  EXPECT_FALSE(c.tensor.same_view(c.tensor.slice(0, 2)));
  EXPECT_FALSE(c.tensor.same_view(c.tensor.column_slice(0, 3)));
  EXPECT_EQ(c.tensor.bytes(), 48);
}

TEST(BFloat16, EveryValueSurvivesTheRoundTripThroughFloat) {
  for (uint32_t bits = 0; bits < 0x10000; ++bits) {
    bf16 value;
    value.bits = uint16_t(bits);
    const float wide = float(value);
    if (std::isnan(wide)) {
      EXPECT_TRUE(std::isnan(float(bf16(wide)))) << bits;
    } else {
      EXPECT_EQ(bf16(wide).bits, bits);
    }
  }
}

TEST(BFloat16, RoundsToNearestEven) {
  EXPECT_EQ(float(bf16(1 + 0x1p-8f)), 1.0f);
  EXPECT_EQ(float(bf16(1 + 0x3p-8f)), 1 + 0x1p-6f);
  EXPECT_EQ(float(bf16(std::nextafter(1 + 0x1p-8f, 2.0f))), 1 + 0x1p-7f);
  EXPECT_EQ(float(bf16(std::numeric_limits<float>::max())), std::numeric_limits<float>::infinity());
  const float signalling = std::bit_cast<float>(0x7F800001u);  // its payload lies in the half that is cut off
  EXPECT_TRUE(std::isnan(float(bf16(signalling))));
}

}  // namespace
}  // namespace optimus::test
