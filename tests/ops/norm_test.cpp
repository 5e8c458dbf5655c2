// RMS and layer normalisation, over whole rows and over groups of columns (heads), forward and backward.
#include "support/backends.h"
#include "support/reference.h"

namespace optimus::test {
namespace {

using NormTest = OpsTest;
OPTIMUS_ON_EVERY_BACKEND(NormTest);

constexpr float kEps = 1e-5f;
enum class Affine { none, weight, weight_and_bias };
enum class Addend { none, same, other };

struct NormCase {
  NormKind kind;
  Affine affine;
  int64_t rows, groups, width;
  Addend addend = Addend::none;
  DType type = DType::f32;
  Layout layout = Layout::contiguous;

  int64_t columns() const { return groups * width; }
  reference::NormShape shape() const { return {kind, double(kEps), groups, width}; }
  std::string text() const {
    return fmt::format("kind {} affine {} rows {} groups {} width {} addend {} {} {}", int(kind), int(affine), rows,
                       groups, width, int(addend), name_of(type), layout == Layout::pitched ? "pitched" : "");
  }
};

/// Rows of different size; the second is all zeros, as an embedding's padding row is.
Values row_values(const NormCase& c) {
  Values x = normal_values(c.rows * c.columns(), 1);
  for (size_t i = 0; i < x.size(); ++i) {
    const size_t row = i / size_t(c.columns());
    x[i] *= row == 1 ? 0 : 0.5 + double(row % 4);
  }
  return x;
}

struct Parameters {
  Tensor weight, bias;
};
Parameters parameters_of(Workspace& w, const NormCase& c) {
  Parameters out;
  if (c.affine != Affine::none) out.weight = w.input(c.type, {c.width}, normal_values(c.width, 2, 1, 0.5));
  if (c.affine == Affine::weight_and_bias) out.bias = w.input(c.type, {c.width}, normal_values(c.width, 3));
  return out;
}
Values read_or_empty(const Workspace& w, const Tensor& tensor) { return tensor ? w.read(tensor) : Values{}; }

/// Row by row, for the zero row's 1/sqrt(eps) is hundreds of times the others' and would hide them.
::testing::AssertionResult rows_close(const Values& actual, const Values& expected, int64_t columns, double tolerance) {
  const auto row_of = [columns](const Values& all, int64_t row) {
    return Values(all.begin() + row * columns, all.begin() + (row + 1) * columns);
  };
  for (int64_t row = 0; row < int64_t(expected.size()) / columns; ++row)
    if (const auto result = close(row_of(actual, row), row_of(expected, row), tolerance); !result)
      return ::testing::AssertionFailure() << "row " << row << ": " << result.message();
  return ::testing::AssertionSuccess();
}

void check_forward(Device& device, Ops& ops, const NormCase& c) {
  SCOPED_TRACE(c.text());
  Workspace w(device);
  const Tensor x = w.input(c.type, {c.rows, c.columns()}, row_values(c), c.layout);
  const auto [weight, bias] = parameters_of(w, c);
  const Values before = normal_values(c.rows * c.columns(), 4);
  Tensor y, addend;
  if (c.addend == Addend::same) y = addend = w.in_out(c.type, {c.rows, c.columns()}, before, c.layout);
  else y = w.output(c.type, {c.rows, c.columns()}, c.layout);
  if (c.addend == Addend::other) addend = w.input(c.type, {c.rows, c.columns()}, before, c.layout);
  const Tensor statistics = w.output(DType::f32, {c.rows, c.groups * 2});

  auto [expected, expected_statistics] =
      reference::norm(c.shape(), w.read(x), read_or_empty(w, weight), read_or_empty(w, bias));
  if (addend) expected = reference::sum(expected, w.read(addend));
  w.run([&] { ops.norm(c.kind, kEps, c.groups, x, weight, bias, addend, y, statistics); });
  EXPECT_TRUE(rows_close(w.read(y), expected, c.columns(), tolerance_of(c.type))) << "y";
  EXPECT_TRUE(rows_close(w.read(statistics), expected_statistics, c.groups * 2, 1e-5)) << "statistics";

  // In place: the same bits.
  if (c.addend == Addend::same) return;
  const Tensor both = w.in_out(c.type, {c.rows, c.columns()}, w.read(x), c.layout);
  w.run([&] { ops.norm(c.kind, kEps, c.groups, both, weight, bias, addend, both, statistics); });
  EXPECT_EQ(w.read(both), w.read(y)) << "in place";
}

void check_backward(Device& device, Ops& ops, const NormCase& c, DType gradient, Write write, bool in_place) {
  SCOPED_TRACE(c.text() + fmt::format(" gradient {} write {} in place {}", name_of(gradient), int(write), in_place));
  Workspace w(device);
  const Shape shape{c.rows, c.columns()};
  const Tensor x = w.input(c.type, shape, row_values(c), c.layout);
  const auto [weight, bias] = parameters_of(w, c);
  const Values weights = read_or_empty(w, weight);
  const Tensor statistics =
      w.input(DType::f32, {c.rows, c.groups * 2}, reference::norm(c.shape(), w.read(x), weights, {}).statistics);
  const Values upstream = normal_values(c.rows * c.columns(), 5), before = normal_values(c.rows * c.columns(), 6);
  const Tensor dy = in_place ? w.in_out(c.type, shape, upstream, c.layout) : w.input(c.type, shape, upstream, c.layout);
  Tensor dx = dy, addend;
  if (!in_place && c.addend == Addend::same) dx = addend = w.in_out(c.type, shape, before, c.layout);
  else if (!in_place) dx = w.output(c.type, shape, c.layout);
  if (c.addend == Addend::other) addend = w.input(c.type, shape, before, c.layout);
  const auto parameter_gradient = [&](bool wanted, uint64_t seed) {
    if (!wanted) return Tensor();
    return write == Write::overwrite ? w.output(gradient, {c.width})
                                     : w.in_out(gradient, {c.width}, normal_values(c.width, seed));
  };
  const Tensor dweight = parameter_gradient(bool(weight), 7), dbias = parameter_gradient(bool(bias), 8);

  auto expected = reference::norm_backward(c.shape(), w.read(x), weights, w.read(dy));
  if (addend) expected.dx = reference::sum(expected.dx, w.read(addend));
  if (write == Write::accumulate && dweight) expected.dweight = reference::sum(expected.dweight, w.read(dweight));
  if (write == Write::accumulate && dbias) expected.dbias = reference::sum(expected.dbias, w.read(dbias));
  w.run([&] { ops.norm_backward(c.kind, c.groups, x, weight, statistics, dy, addend, dx, dweight, dbias, write); });
  EXPECT_TRUE(rows_close(w.read(dx), expected.dx, c.columns(), tolerance_of(c.type))) << "dx";
  if (!dweight) return;
  EXPECT_TRUE(close(w.read(dweight), expected.dweight, tolerance_of(gradient))) << "dweight";
  if (!dbias) return;
  EXPECT_TRUE(close(w.read(dbias), expected.dbias, tolerance_of(gradient))) << "dbias";
}

std::vector<NormCase> cases() {
  std::vector<NormCase> out;
  const std::vector<std::pair<NormKind, Affine>> kinds = {{NormKind::rms, Affine::weight},
                                                          {NormKind::rms, Affine::none},
                                                          {NormKind::layer, Affine::weight_and_bias},
                                                          {NormKind::layer, Affine::weight},
                                                          {NormKind::layer, Affine::none}};
  const std::vector<std::array<int64_t, 3>> shapes = {{1, 1, 8},  {9, 1, 33},    {5, 3, 16},
                                                      {7, 4, 24}, {130, 1, 100}, {0, 2, 8}};
  for (const auto& [kind, affine] : kinds)
    for (const auto& [rows, groups, width] : shapes)
      for (DType type : {DType::f32, DType::bf16}) {
        out.push_back({kind, affine, rows, groups, width, Addend::none, type});
        out.push_back({kind, affine, rows, groups, width, Addend::same, type});
        out.push_back({kind, affine, rows, groups, width, Addend::other, type, Layout::pitched});
      }
  return out;
}

TEST_P(NormTest, Forward) {
  for (const NormCase& c : cases()) check_forward(device(), ops(), c);
}

TEST_P(NormTest, Backward) {
  for (const NormCase& c : cases())
    for (Write write : {Write::overwrite, Write::accumulate}) {
      check_backward(device(), ops(), c, DType::f32, write, false);
      if (c.type == DType::bf16) check_backward(device(), ops(), c, DType::bf16, write, false);
      if (c.addend != Addend::same) check_backward(device(), ops(), c, DType::f32, write, true);
    }
}

// mean(x^2) - mean(x)^2 in f32 would lose this variance.
TEST_P(NormTest, ModelWidths) {
  for (const auto& [rows, groups, width] :
       std::vector<std::array<int64_t, 3>>{{9, 1, 512}, {7, 1, 2048}, {5, 1, 4096}, {3, 1, 8192}, {40, 16, 128}})
    for (DType type : {DType::f32, DType::bf16})
      for (NormKind kind : {NormKind::rms, NormKind::layer}) {
        const NormCase c{kind, Affine::weight, rows, groups, width, Addend::other, type};
        check_forward(device(), ops(), c);
        for (Write write : {Write::overwrite, Write::accumulate})
          check_backward(device(), ops(), c, DType::f32, write, false);
      }
}

TEST_P(NormTest, LayerVarianceOfRowsFarFromZero) {
  const int64_t rows = 6, width = 64;
  Workspace w(device());
  const Tensor x = w.input(DType::f32, {rows, width}, normal_values(rows * width, 1, 30, 1));
  const Tensor y = w.output(DType::f32, {rows, width}), statistics = w.output(DType::f32, {rows, 2});
  w.run([&] { ops().norm(NormKind::layer, kEps, 1, x, {}, {}, {}, y, statistics); });
  EXPECT_TRUE(close(w.read(y), reference::norm({NormKind::layer, double(kEps), 1, width}, w.read(x), {}, {}).y, 1e-5));
}

TEST_P(NormTest, GradientAgreesWithCentralDifferences) {
  for (NormKind kind : {NormKind::rms, NormKind::layer})
    for (int64_t groups : {1, 3}) {
      const int64_t rows = 4, width = 10, columns = groups * width;
      SCOPED_TRACE(fmt::format("kind {} groups {}", int(kind), groups));
      const reference::NormShape shape{kind, double(kEps), groups, width};
      Workspace w(device());
      const Tensor x = w.input(DType::f32, {rows, columns}, normal_values(rows * columns, 1));
      const Tensor weight = w.input(DType::f32, {width}, normal_values(width, 2));
      const bool has_bias = kind == NormKind::layer;
      const Tensor bias = has_bias ? w.input(DType::f32, {width}, normal_values(width, 3)) : Tensor();
      const Tensor dy = w.input(DType::f32, {rows, columns}, normal_values(rows * columns, 4));
      const Tensor y = w.output(DType::f32, {rows, columns}), statistics = w.output(DType::f32, {rows, groups * 2});
      const Tensor dx = w.output(DType::f32, {rows, columns});
      const Tensor dweight = w.output(DType::f32, {width}), dbias = has_bias ? w.output(DType::f32, {width}) : Tensor();
      w.run([&] {
        ops().norm(kind, kEps, groups, x, weight, bias, {}, y, statistics);
        ops().norm_backward(kind, groups, x, weight, statistics, dy, {}, dx, dweight, dbias, Write::overwrite);
      });
      const Values xs = w.read(x), weights = w.read(weight), biases = read_or_empty(w, bias), dys = w.read(dy);
      using reference::dot, reference::norm, reference::numeric_gradient;
      const Values by_x =
          numeric_gradient([&](const Values& v) { return dot(norm(shape, v, weights, biases).y, dys); }, xs);
      const Values by_weight =
          numeric_gradient([&](const Values& v) { return dot(norm(shape, xs, v, biases).y, dys); }, weights);
      const Values by_bias =
          numeric_gradient([&](const Values& v) { return dot(norm(shape, xs, weights, v).y, dys); }, biases);
      EXPECT_TRUE(close(w.read(dx), by_x, 1e-4)) << "dx";
      EXPECT_TRUE(close(w.read(dweight), by_weight, 1e-4)) << "dweight";
      EXPECT_TRUE(close(read_or_empty(w, dbias), by_bias, 1e-4)) << "dbias";
    }
}

}  // namespace
}  // namespace optimus::test
