// The router: scores, choice, gates, statistics, gradients, and the balance loss.
#include "support/backends.h"
#include "support/reference.h"

namespace optimus::test {
namespace {

using RouterTest = OpsTest;
OPTIMUS_ON_EVERY_BACKEND(RouterTest);

struct RouterCase {
  int64_t tokens, experts;
  RouterShape shape;
  bool biased;
  std::string text() const {
    return fmt::format("tokens {} experts {} top_k {} score {} normalized {} scale {} groups {}/{} biased {}", tokens,
                       experts, shape.top_k, int(shape.score), shape.normalize_top_k, shape.score_scale,
                       shape.top_groups, shape.groups, biased);
  }
};

std::vector<RouterCase> cases() {
  std::vector<RouterCase> out;
  struct Size {
    int64_t tokens, experts, top_k, groups, top_groups, unit;
  };
  const std::vector<Size> sizes = {{1, 1, 1, 1, 1, 1},    {13, 8, 2, 1, 1, 13},    {24, 16, 4, 4, 2, 8},
                                   {37, 13, 3, 1, 1, 37}, {20, 64, 8, 8, 3, 5},    {6, 160, 6, 1, 1, 3},
                                   {9, 4, 4, 1, 1, 3},    {300, 16, 4, 1, 1, 150}, {0, 8, 2, 1, 1, 4},
                                   {5, 512, 8, 1, 1, 5},  {3, 600, 40, 1, 1, 3},   {200, 64, 8, 1, 1, 200}};
  for (const Size& s : sizes)
    for (ScoreKind score : {ScoreKind::softmax, ScoreKind::sigmoid})
      for (bool normalize : {false, true})
        for (bool biased : {false, true})
          out.push_back({s.tokens,
                         s.experts,
                         {s.top_k, score, normalize, normalize ? 2.5f : 1.0f, s.groups, s.top_groups, s.unit},
                         biased});
  return out;
}

struct RouterTensors {
  Tensor logits, bias, probs, gates, ids, lse;
};
RouterTensors make_tensors(Workspace& w, const RouterCase& c, const Values& logits) {
  return {w.input(DType::f32, {c.tokens, c.experts}, logits),
          c.biased ? w.input(DType::f32, {c.experts}, normal_values(c.experts, 2, 0, 0.1)) : Tensor(),
          w.output(DType::f32, {c.tokens, c.experts}),
          w.output(DType::f32, {c.tokens, c.shape.top_k}),
          w.output(DType::i32, {c.tokens, c.shape.top_k}),
          w.output(DType::f32, {c.tokens})};
}
Values logits_of(const RouterCase& c) { return normal_values(c.tokens * c.experts, 1, 0.5, 1.5); }

TEST_P(RouterTest, ScoresChoiceAndGates) {
  for (const RouterCase& c : cases()) {
    SCOPED_TRACE(c.text());
    Workspace w(device());
    const auto [logits, bias, probs, gates, ids, lse] = make_tensors(w, c, logits_of(c));
    w.run([&, &logits = logits, &bias = bias, &probs = probs, &gates = gates, &ids = ids, &lse = lse] {
      ops().router(c.shape, logits, bias, probs, gates, ids, lse);
    });
    const Values biases = bias ? w.read(bias) : Values{};
    const Indices choice = reference::router_choice(c.shape, w.read(logits), biases, c.experts);
    const auto expected = reference::router(c.shape, w.read(logits), choice, c.experts);
    EXPECT_EQ(w.read_indices(ids), choice);
    EXPECT_TRUE(close(w.read(probs), expected.probs, 1e-5)) << "probs";
    EXPECT_TRUE(close(w.read(gates), expected.gates, 1e-5)) << "gates";
    EXPECT_TRUE(close(w.read(lse), expected.lse, 1e-5)) << "lse";
  }
}

// Logits of three distinct values tie everywhere. Equal logits must get equal scores, whichever SIMD lane computes
// them, so that the lower id wins.
TEST_P(RouterTest, TiesGoToTheLowerId) {
  for (const RouterCase& c : cases()) {
    if (c.biased) continue;
    SCOPED_TRACE(c.text());
    Values few(size_t(c.tokens * c.experts));
    for (size_t i = 0; i < few.size(); ++i) few[i] = 0.37 * double(int64_t(i * i + i / 7) % 3);
    for (const Values& values : {few, Values(few.size(), 0.7)}) {
      Workspace w(device());
      const auto [logits, bias, probs, gates, ids, lse] = make_tensors(w, c, values);
      w.run([&, &logits = logits, &bias = bias, &probs = probs, &gates = gates, &ids = ids, &lse = lse] {
        ops().router(c.shape, logits, bias, probs, gates, ids, lse);
      });
      EXPECT_EQ(w.read_indices(ids), reference::router_choice(c.shape, w.read(logits), {}, c.experts));
    }
  }
}

TEST_P(RouterTest, LargeLogits) {
  const RouterCase c{5, 8, {2, ScoreKind::softmax, false, 1, 1, 1, 5}, false};
  Workspace w(device());
  const auto [logits, bias, probs, gates, ids, lse] = make_tensors(w, c, normal_values(40, 1, 500, 3));
  w.run([&, &logits = logits, &bias = bias, &probs = probs, &gates = gates, &ids = ids, &lse = lse] {
    ops().router(c.shape, logits, bias, probs, gates, ids, lse);
  });
  const Indices choice = reference::router_choice(c.shape, w.read(logits), {}, c.experts);
  const auto expected = reference::router(c.shape, w.read(logits), choice, c.experts);
  EXPECT_TRUE(close(w.read(probs), expected.probs, 1e-5)) << "probs";
  EXPECT_TRUE(close(w.read(lse), expected.lse, 1e-5)) << "lse";
}

TEST_P(RouterTest, StatisticsAreExactCountsAndSums) {
  for (const RouterCase& c : cases()) {
    SCOPED_TRACE(c.text());
    Workspace w(device());
    const int64_t units = c.tokens / c.shape.tokens_per_unit;
    ASSERT_EQ(units * c.shape.tokens_per_unit, c.tokens);
    const Values logit_values = logits_of(c);
    const Indices choice = reference::router_choice(c.shape, logit_values, {}, c.experts);
    const auto forward = reference::router(c.shape, logit_values, choice, c.experts);
    const Tensor probs = w.input(DType::f32, {c.tokens, c.experts}, forward.probs);
    const Tensor ids = w.indices({c.tokens, c.shape.top_k}, choice), lse = w.input(DType::f32, {c.tokens}, forward.lse);
    const Tensor counts = w.output(DType::f32, {units, c.experts}), sums = w.output(DType::f32, {units, c.experts});
    const Tensor z = w.in_out(DType::f64, {1}, {0.5});
    w.run([&] { ops().router_statistics(c.shape, probs, ids, lse, counts, sums, z); });
    Values expected_counts(size_t(units * c.experts)), expected_sums(size_t(units * c.experts));
    for (int64_t t = 0; t < c.tokens; ++t) {
      const int64_t unit = t / c.shape.tokens_per_unit;
      for (int64_t k = 0; k < c.shape.top_k; ++k)
        expected_counts[size_t(unit * c.experts + choice[size_t(t * c.shape.top_k + k)])] += 1;
      for (int64_t e = 0; e < c.experts; ++e)
        expected_sums[size_t(unit * c.experts + e)] += forward.probs[size_t(t * c.experts + e)];
    }
    EXPECT_EQ(w.read(counts), expected_counts);
    EXPECT_TRUE(close(w.read(sums), expected_sums, 1e-5)) << "prob_sums";
    EXPECT_NEAR(w.read(z)[0], 0.5 + reference::dot(forward.lse, forward.lse), 1e-5 * (1 + w.read(z)[0])) << "z_sum";
  }
}

TEST_P(RouterTest, BackwardAgreesWithReferenceAndCentralDifferences) {
  for (const RouterCase& c : cases())
    for (bool balanced : {false, true})
      for (float z_scale : {0.0f, 0.01f}) {
        if (c.biased) continue;  // selection only
        SCOPED_TRACE(c.text() + fmt::format(" balanced {} z {}", balanced, z_scale));
        Workspace w(device());
        const int64_t units = c.tokens / c.shape.tokens_per_unit;
        const Tensor logits = w.input(DType::f32, {c.tokens, c.experts}, logits_of(c));
        const Values logit_values = w.read(logits);
        const Indices choice = reference::router_choice(c.shape, logit_values, {}, c.experts);
        const auto forward = reference::router(c.shape, logit_values, choice, c.experts);
        const Shape chosen{c.tokens, c.shape.top_k};
        const Tensor probs = w.input(DType::f32, {c.tokens, c.experts}, forward.probs);
        const Tensor gates = w.input(DType::f32, chosen, forward.gates), ids = w.indices(chosen, choice);
        const Tensor lse = w.input(DType::f32, {c.tokens}, forward.lse);
        const Tensor dgates = w.input(DType::f32, chosen, normal_values(chosen.elements(), 4));
        const Tensor balance =
            balanced ? w.input(DType::f32, {units, c.experts}, normal_values(units * c.experts, 5)) : Tensor();
        const Tensor dlogits = w.output(DType::f32, {c.tokens, c.experts});
        w.run(
            [&] { ops().router_backward(c.shape, logits, probs, gates, ids, lse, dgates, balance, z_scale, dlogits); });

        const Values dgate_values = w.read(dgates), balance_values = balanced ? w.read(balance) : Values{};
        EXPECT_TRUE(close(
            w.read(dlogits),
            reference::router_backward(c.shape, logit_values, choice, dgate_values, balance_values, z_scale, c.experts),
            2e-5));
        if (c.tokens * c.experts > 150) continue;
        const auto objective = [&](const Values& x) {
          const auto r = reference::router(c.shape, x, choice, c.experts);
          double sum = reference::dot(r.gates, dgate_values) + double(z_scale) * reference::dot(r.lse, r.lse);
          for (size_t i = 0; i < r.probs.size() && balanced; ++i) {
            const int64_t unit = int64_t(i) / c.experts / c.shape.tokens_per_unit;
            sum += r.probs[i] * balance_values[size_t(unit * c.experts) + i % size_t(c.experts)];
          }
          return sum;
        };
        const Values by_logits = reference::numeric_gradient(objective, logit_values);
        EXPECT_TRUE(close(w.read(dlogits), by_logits, 1e-4)) << "against central differences";
      }
}

TEST_P(RouterTest, BalanceLossAndItsGradient) {
  const int64_t experts = 6;
  const double tokens = 10, scale = 0.03;
  for (int64_t units : {1, 3})
    for (bool fixed : {false, true}) {
      SCOPED_TRACE(fmt::format("units {} fixed {}", units, fixed));
      Workspace w(device());
      Values counts, sums;
      for (int64_t i = 0; i < units * experts; ++i) {
        counts.push_back(double(i % 5));
        sums.push_back(0.25 + double(i % 7));
      }
      const Tensor counts_UE = w.input(DType::f32, {units, experts}, counts);
      const Tensor sums_UE = w.input(DType::f32, {units, experts}, sums);
      const Tensor fixed_f = fixed ? w.input(DType::f32, {experts}, {0.5, 0, 0.25, 1, 0.125, 2}) : Tensor();
      const Tensor loss = w.in_out(DType::f64, {1}, {0.75}), gradient = w.output(DType::f32, {units, experts});
      w.run([&] { ops().balance_loss(counts_UE, sums_UE, fixed_f, tokens, scale, 2 * scale, loss, gradient); });

      const auto f_of = [&](size_t i) { return fixed ? w.read(fixed_f)[i % experts] : counts[i] / tokens; };
      const auto objective = [&](const Values& prob_sums) {
        double sum = 0;
        for (size_t i = 0; i < counts.size(); ++i) sum += f_of(i) * prob_sums[i] / tokens;
        return scale * double(experts) * sum;
      };
      EXPECT_NEAR(w.read(loss)[0], 0.75 + objective(sums), 1e-6);
      Values twice = reference::numeric_gradient(objective, sums);
      for (double& value : twice) value *= 2;  // gradient_scale is independent of the loss's scale
      EXPECT_TRUE(close(w.read(gradient), twice, 1e-6));
    }
}

}  // namespace
}  // namespace optimus::test
