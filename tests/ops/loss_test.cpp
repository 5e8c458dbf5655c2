// Cross-entropy and its gradient in place.
#include "support/backends.h"
#include "support/reference.h"

namespace optimus::test {
namespace {

using CrossEntropyTest = OpsTest;
OPTIMUS_ON_EVERY_BACKEND(CrossEntropyTest);

struct LossCase {
  int64_t tokens, vocabulary;
  double mean = 0, deviation = 2;
};
const std::vector<LossCase> kCases = {{1, 1},         {1, 2},         {7, 33}, {19, 257}, {5, 1000},
                                      {8, 48, 80, 1}, {6, 40, 0, 30}, {0, 16}, {2, 9000}, {2, 60008}};

/// Rows 2, 5, 8, ... have weight 0 and a target that is no token.
struct Targets {
  Indices ids;
  Values weights;
};
Targets targets_of(const LossCase& c) {
  Targets out;
  for (int64_t t = 0; t < c.tokens; ++t) {
    const bool ignored = t % 3 == 2;
    out.ids.push_back(ignored ? (t % 2 ? -100 : 1'000'000'000) : (t * 11 + 3) % c.vocabulary);
    out.weights.push_back(ignored ? 0 : t % 3 == 1 ? 0.5 : 1);
  }
  return out;
}

TEST_P(CrossEntropyTest, LossAndGradient) {
  for (const LossCase& c : kCases)
    for (DType type : {DType::f32, DType::bf16})
      for (Layout layout : {Layout::contiguous, Layout::pitched}) {
        SCOPED_TRACE(fmt::format("tokens {} vocabulary {} mean {} {}", c.tokens, c.vocabulary, c.mean, name_of(type)));
        Workspace w(device());
        const auto [ids, weights] = targets_of(c);
        const Shape shape{c.tokens, c.vocabulary};
        const Tensor logits = w.in_out(type, shape, normal_values(shape.elements(), 1, c.mean, c.deviation), layout);
        const Tensor targets_T = w.indices({c.tokens}, ids), weights_T = w.input(DType::f32, {c.tokens}, weights);
        const Tensor loss = w.in_out(DType::f64, {1}, {1.5});
        auto expected = reference::cross_entropy(w.read(logits), ids, weights);
        for (double& value : expected.gradient) value *= 0.25;
        w.run([&] { ops().cross_entropy(logits, targets_T, weights_T, 0.25f, loss); });
        EXPECT_NEAR(w.read(loss)[0], 1.5 + expected.loss, 1e-5 * (1 + expected.loss));
        EXPECT_TRUE(close(w.read(logits), expected.gradient, tolerance_of(type)));
        for (int64_t t = 2; t < c.tokens; t += 3)
          EXPECT_EQ(w.read(logits.slice(t, 1)), Values(size_t(c.vocabulary), 0.0)) << "row " << t << " has no weight";
      }
}

TEST_P(CrossEntropyTest, ScaleZeroOnlyMeasures) {
  for (const LossCase& c : kCases)
    for (DType type : {DType::f32, DType::bf16}) {
      SCOPED_TRACE(fmt::format("tokens {} vocabulary {} {}", c.tokens, c.vocabulary, name_of(type)));
      Workspace w(device());
      const auto [ids, weights] = targets_of(c);
      const Shape shape{c.tokens, c.vocabulary};
      const Tensor logits = w.input(type, shape, normal_values(shape.elements(), 1, c.mean, c.deviation));
      const Tensor targets_T = w.indices({c.tokens}, ids), weights_T = w.input(DType::f32, {c.tokens}, weights);
      const Tensor loss = w.in_out(DType::f64, {1}, {0});
      w.run([&] { ops().cross_entropy(logits, targets_T, weights_T, 0, loss); });
      const double expected = reference::cross_entropy(w.read(logits), ids, weights).loss;
      EXPECT_NEAR(w.read(loss)[0], expected, 1e-5 * (1 + expected));
    }
}

TEST_P(CrossEntropyTest, GradientAgreesWithCentralDifferences) {
  const LossCase c{7, 12};
  Workspace w(device());
  const auto [ids, weights] = targets_of(c);
  const Tensor logits = w.in_out(DType::f32, {7, 12}, normal_values(84, 1));
  const Tensor targets_T = w.indices({7}, ids), weights_T = w.input(DType::f32, {7}, weights);
  const Tensor loss = w.in_out(DType::f64, {1}, {0});
  const Values expected = reference::numeric_gradient(
      [&, &ids = ids, &weights = weights](const Values& x) { return reference::cross_entropy(x, ids, weights).loss; },
      w.read(logits));
  w.run([&] { ops().cross_entropy(logits, targets_T, weights_T, 1, loss); });
  EXPECT_TRUE(close(w.read(logits), expected, 1e-4));
}

}  // namespace
}  // namespace optimus::test
