// Matrix products: y[M,N] = op(a) op(b) + addend.
#include "support/backends.h"
#include "support/reference.h"

namespace optimus::test {
namespace {

using MatmulTest = OpsTest;
OPTIMUS_ON_EVERY_BACKEND(MatmulTest);

enum class Addend { none, same, other };

struct MatmulCase {
  int64_t m, n, k;
  Transpose ta, tb;
  Addend addend;
  DType in, out;
  Layout layout;
};

void check(Device& device, Ops& ops, const MatmulCase& c) {
  SCOPED_TRACE(fmt::format("m {} n {} k {} transposed {} {} addend {} {} to {} {}", c.m, c.n, c.k,
                           c.ta == Transpose::yes, c.tb == Transpose::yes, int(c.addend), name_of(c.in), name_of(c.out),
                           c.layout == Layout::pitched ? "pitched" : ""));
  Workspace w(device);
  const Shape shape_a = c.ta == Transpose::yes ? Shape{c.k, c.m} : Shape{c.m, c.k};
  const Shape shape_b = c.tb == Transpose::yes ? Shape{c.n, c.k} : Shape{c.k, c.n};
  const Tensor a = w.input(c.in, shape_a, normal_values(c.m * c.k, 1), c.layout);
  const Tensor b = w.input(c.in, shape_b, normal_values(c.k * c.n, 2), c.layout);
  const Values before = normal_values(c.m * c.n, 3);
  Tensor y, addend;
  if (c.addend == Addend::same) y = addend = w.in_out(c.out, {c.m, c.n}, before, c.layout);
  else y = w.output(c.out, {c.m, c.n}, c.layout);
  if (c.addend == Addend::other) addend = w.input(c.out, {c.m, c.n}, before, c.layout);

  Values expected = reference::matmul(w.read(a), c.ta, w.read(b), c.tb, c.m, c.n, c.k);
  if (addend) expected = reference::sum(expected, w.read(addend));
  w.run([&] { ops.matmul(a, c.ta, b, c.tb, y, addend); });
  EXPECT_TRUE(close(w.read(y), expected, tolerance_of(c.out)));
}

TEST_P(MatmulTest, EveryTransposeTypeAndAddend) {
  const std::vector<std::array<int64_t, 3>> shapes = {{1, 1, 1}, {3, 5, 7}, {17, 33, 9}, {64, 48, 32}};
  for (const auto& [m, n, k] : shapes)
    for (Transpose ta : {Transpose::no, Transpose::yes})
      for (Transpose tb : {Transpose::no, Transpose::yes})
        for (Addend addend : {Addend::none, Addend::same, Addend::other})
          for (DType in : {DType::f32, DType::bf16})
            for (DType out : {DType::f32, DType::bf16})
              check(device(), ops(), {m, n, k, ta, tb, addend, in, out, Layout::contiguous});
}

TEST_P(MatmulTest, PitchedViews) {
  const std::vector<std::array<int64_t, 3>> shapes = {{1, 4, 6}, {5, 1, 3}, {19, 34, 21}};
  for (const auto& [m, n, k] : shapes)
    for (Transpose ta : {Transpose::no, Transpose::yes})
      for (Transpose tb : {Transpose::no, Transpose::yes})
        for (Addend addend : {Addend::none, Addend::same, Addend::other})
          for (DType type : {DType::f32, DType::bf16})
            check(device(), ops(), {m, n, k, ta, tb, addend, type, type, Layout::pitched});
}

TEST_P(MatmulTest, SizesAroundTilesAndVectors) {
  const std::vector<std::array<int64_t, 3>> shapes = {
      {65, 127, 31}, {1, 130, 64}, {128, 1, 77}, {97, 96, 257}, {8, 16, 513}};
  for (const auto& [m, n, k] : shapes)
    for (DType type : {DType::f32, DType::bf16})
      check(device(), ops(), {m, n, k, Transpose::no, Transpose::yes, Addend::none, type, type, Layout::contiguous});
}

TEST_P(MatmulTest, WholeTiles) {
  for (const auto& [m, n, k] : std::vector<std::array<int64_t, 3>>{{256, 384, 512}, {512, 136, 264}})
    for (Transpose ta : {Transpose::no, Transpose::yes})
      for (Transpose tb : {Transpose::no, Transpose::yes})
        for (Addend addend : {Addend::none, Addend::same})
          for (DType out : {DType::f32, DType::bf16})
            check(device(), ops(), {m, n, k, ta, tb, addend, DType::bf16, out, Layout::contiguous});
}

// No tokens: the forward product has no rows, the weight gradient has nothing to sum.
TEST_P(MatmulTest, EmptyDimensions) {
  for (DType type : {DType::f32, DType::bf16})
    for (Addend addend : {Addend::none, Addend::same, Addend::other}) {
      check(device(), ops(), {0, 5, 3, Transpose::no, Transpose::yes, addend, type, type, Layout::contiguous});
      check(device(), ops(), {4, 3, 0, Transpose::yes, Transpose::no, addend, type, DType::f32, Layout::contiguous});
    }
}

}  // namespace
}  // namespace optimus::test
