// fill, copy with conversion, add, and the random initialisation.
#include <limits>

#include "support/backends.h"
#include "support/reference.h"

namespace optimus::test {
namespace {

using ElementwiseTest = OpsTest;
using FillNormalTest = OpsTest;
OPTIMUS_ON_EVERY_BACKEND(ElementwiseTest);
OPTIMUS_ON_EVERY_BACKEND(FillNormalTest);

const std::vector<Shape> kShapes = {{1}, {0, 5}, {3, 7}, {33, 19}, {2, 3, 5}, {4, 512}, {300, 101}};

TEST_P(ElementwiseTest, Fill) {
  for (const Shape& shape : kShapes)
    for (DType type : {DType::f32, DType::bf16, DType::i16, DType::i32, DType::i64, DType::f64})
      for (Layout layout : {Layout::contiguous, Layout::pitched})
        for (double value : {0.0, -3.0}) {
          SCOPED_TRACE(fmt::format("{} {} {}", shape.text(), name_of(type), value));
          Workspace w(device());
          const Tensor x = w.output(type, shape, layout);
          w.run([&] { ops().fill(x, value); });
          EXPECT_EQ(w.read(x), Values(size_t(shape.elements()), value));
        }
}

TEST_P(ElementwiseTest, CopyBetweenTypesAndPitches) {
  for (const Shape& shape : kShapes)
    for (DType from : {DType::f32, DType::bf16})
      for (DType to : {DType::f32, DType::bf16})
        for (Layout layout_from : {Layout::contiguous, Layout::pitched})
          for (Layout layout_to : {Layout::contiguous, Layout::pitched}) {
            SCOPED_TRACE(fmt::format("{} {} to {}", shape.text(), name_of(from), name_of(to)));
            Workspace w(device());
            const Tensor x = w.input(from, shape, normal_values(shape.elements(), 1), layout_from);
            const Tensor y = w.output(to, shape, layout_to);
            w.run([&] { ops().copy(x, y); });
            Values expected = w.read(x);
            if (to == DType::bf16)
              for (double& value : expected) value = double(float(bf16(float(value))));
            EXPECT_EQ(w.read(y), expected);
          }
}

TEST_P(ElementwiseTest, CopyOfOtherTypes) {
  for (const Shape& shape : kShapes)
    for (DType type : {DType::i16, DType::i32, DType::i64, DType::f64})
      for (Layout layout_from : {Layout::contiguous, Layout::pitched})
        for (Layout layout_to : {Layout::contiguous, Layout::pitched}) {
          SCOPED_TRACE(fmt::format("{} {}", shape.text(), name_of(type)));
          Workspace w(device());
          const Tensor x = w.input(type, shape, normal_values(shape.elements(), 1, 0, 1e4), layout_from);
          const Tensor y = w.output(type, shape, layout_to);
          w.run([&] { ops().copy(x, y); });
          EXPECT_EQ(w.read(y), w.read(x));
        }
}

// Operands that begin anywhere: an element past a boundary, not all the same.
TEST_P(ElementwiseTest, Slices) {
  const int64_t count = 203, size = 190;
  for (DType type : {DType::f32, DType::bf16})
    for (int64_t a : {0, 1, 3})
      for (int64_t b : {0, 1, 4}) {
        SCOPED_TRACE(fmt::format("{} {} {}", name_of(type), a, b));
        Workspace w(device());
        const Tensor x = w.input(type, {count}, normal_values(count, 1)).slice(a, size);
        const Tensor y = w.output(type, {count}), z = w.output(type, {count}), filled = w.output(type, {count});
        w.run([&] {
          ops().copy(x, y.slice(b, size));
          ops().add(x, x, z.slice(b, size));
          ops().fill(filled.slice(b, size), 2.0);
        });
        EXPECT_EQ(w.read(y.slice(b, size)), w.read(x));
        EXPECT_EQ(w.read(z.slice(b, size)), reference::sum(w.read(x), w.read(x)));
        EXPECT_EQ(w.read(filled.slice(b, size)), Values(size_t(size), 2.0));
        for (const Tensor& out : {y, z, filled})
          EXPECT_TRUE(w.untouched(out.slice(0, b)) && w.untouched(out.slice(b + size, count - b - size)));
      }
}

TEST_P(ElementwiseTest, CopyRoundsToNearestEven) {
  const double infinity = std::numeric_limits<double>::infinity(), largest = 0x1.FEp127, smallest = 0x1p-133;
  const std::vector<std::pair<double, double>> table = {{1 + 0x1p-8, 1},                     // ties to even ...
                                                        {1 + 0x3p-8, 1 + 0x1p-6},            // ... in both directions
                                                        {1 + 0x1p-8 + 0x1p-20, 1 + 0x1p-7},  // just above a tie
                                                        {-1 - 0x1p-8, -1},
                                                        {65504, 65536},
                                                        {largest, largest},
                                                        {std::numeric_limits<float>::max(), infinity},
                                                        {infinity, infinity},
                                                        {-infinity, -infinity},
                                                        {smallest, smallest},  // subnormal
                                                        {0x3p-135, smallest},
                                                        {-0.0, -0.0}};
  Values values, expected;
  for (const auto& [value, rounded] : table) values.push_back(value), expected.push_back(rounded);
  Workspace w(device());
  const int64_t count = int64_t(values.size());
  const Tensor x = w.input(DType::f32, {count}, values), y = w.output(DType::bf16, {count});
  const Tensor nan = w.input(DType::f32, {3}, {NAN, -NAN, NAN}), nan_out = w.output(DType::bf16, {3});
  w.run([&] {
    ops().copy(x, y);
    ops().copy(nan, nan_out);
  });
  EXPECT_EQ(w.read(y), expected);
  for (double value : w.read(nan_out)) EXPECT_TRUE(std::isnan(value));
}

TEST_P(ElementwiseTest, Add) {
  enum class Alias { none, first, second };
  for (const Shape& shape : kShapes)
    for (DType type : {DType::f32, DType::bf16})
      for (Layout layout : {Layout::contiguous, Layout::pitched})
        for (Alias alias : {Alias::none, Alias::first, Alias::second}) {
          SCOPED_TRACE(fmt::format("{} {} alias {}", shape.text(), name_of(type), int(alias)));
          Workspace w(device());
          const Tensor a = w.in_out(type, shape, normal_values(shape.elements(), 1), layout);
          const Tensor b = w.in_out(type, shape, normal_values(shape.elements(), 2), layout);
          const Tensor y = alias == Alias::none ? w.output(type, shape, layout) : alias == Alias::first ? a : b;
          const Values expected = reference::sum(w.read(a), w.read(b));
          w.run([&] { ops().add(a, b, y); });
          EXPECT_TRUE(close(w.read(y), expected, type == DType::f32 ? 1e-7 : 4e-3));
        }
}

// ---- random numbers ----

constexpr Philox kGenerator{0x12345678u, 0x9ABCDEF0u};

/// Box-Muller in double on the words of the counter (index / 2, stream).
double expected_normal(uint64_t index, uint64_t stream) {
  uint32_t words[4];
  kGenerator(index / 2, stream, words);
  const double u = (words[index % 2 * 2] + 0.5) / 4294967296.0, v = words[index % 2 * 2 + 1] / 4294967296.0;
  return std::sqrt(-2 * std::log(u)) * std::cos(2 * M_PI * v);
}

TEST_P(FillNormalTest, IsAFunctionOfTheGlobalIndex) {
  for (DType type : {DType::f32, DType::bf16})
    for (int64_t first : {int64_t(0), int64_t(1), int64_t(12345), int64_t(1) << 40}) {
      SCOPED_TRACE(fmt::format("{} from {}", name_of(type), first));
      Workspace w(device());
      const int64_t count = 131;
      const Tensor x = w.output(type, {count});
      w.run([&] { ops().fill_normal(x, 0.02f, kGenerator, 77, first); });
      Values expected;
      for (int64_t i = 0; i < count; ++i) expected.push_back(0.02 * expected_normal(uint64_t(first + i), 77));
      EXPECT_TRUE(close(w.read(x), expected, type == DType::f32 ? 1e-6 : 4e-3));
    }
}

TEST_P(FillNormalTest, PartsEqualTheWholeBitForBit) {
  const int64_t count = 1001;
  for (DType type : {DType::f32, DType::bf16}) {
    Workspace w(device());
    const Tensor whole = w.output(type, {count}), parts = w.output(type, {count});
    w.run([&] {
      ops().fill_normal(whole, 1, kGenerator, 5, 1000);
      const Indices cuts = {0, 1, 2, 17, 500, 1000, count};
      for (size_t i = 0; i + 1 < cuts.size(); ++i)
        ops().fill_normal(parts.slice(cuts[i], cuts[i + 1] - cuts[i]), 1, kGenerator, 5, 1000 + cuts[i]);
    });
    EXPECT_EQ(w.read(parts), w.read(whole));
  }
}

// With n = 200,000 the sample moments of a standard normal have deviations 1/sqrt(n), sqrt(2/n), sqrt(15/n) and
// sqrt(96/n); five of them are allowed.
TEST_P(FillNormalTest, LooksNormalAndIndependent) {
  const int64_t n = 200'000;
  Workspace w(device());
  const Tensor x = w.output(DType::f32, {n}), other = w.output(DType::f32, {n});
  w.run([&] {
    ops().fill_normal(x, 1, kGenerator, 1, 0);
    ops().fill_normal(other, 1, kGenerator, 2, 0);
  });
  const Values a = w.read(x), b = w.read(other);
  double moments[5] = {}, neighbours = 0, streams = 0, beyond_two = 0;
  for (size_t i = 0; i < a.size(); ++i) {
    for (int p = 1; p <= 4; ++p) moments[p] += std::pow(a[i], p) / double(n);
    if (i > 0) neighbours += a[i] * a[i - 1] / double(n);
    streams += a[i] * b[i] / double(n);
    beyond_two += (std::abs(a[i]) > 2) / double(n);
  }
  const double unit = 5 / std::sqrt(double(n));
  EXPECT_NEAR(moments[1], 0, unit);
  EXPECT_NEAR(moments[2], 1, unit * std::sqrt(2));
  EXPECT_NEAR(moments[3], 0, unit * std::sqrt(15));
  EXPECT_NEAR(moments[4], 3, unit * std::sqrt(96));
  EXPECT_NEAR(neighbours, 0, unit);
  EXPECT_NEAR(streams, 0, unit);
  EXPECT_NEAR(beyond_two, 0.0455, unit * 0.21);
}

}  // namespace
}  // namespace optimus::test
