// Embedding lookup and its gradient.
#include "support/backends.h"
#include "support/reference.h"

namespace optimus::test {
namespace {

using EmbeddingTest = OpsTest;
OPTIMUS_ON_EVERY_BACKEND(EmbeddingTest);

Indices some_ids(int64_t tokens, int64_t vocabulary) {
  Indices ids;
  for (int64_t t = 0; t < tokens; ++t) ids.push_back((t * t * 7 + t / 3) % vocabulary);
  return ids;
}

struct EmbeddingCase {
  int64_t tokens, vocabulary, hidden;
};
const std::vector<EmbeddingCase> kCases = {{1, 1, 1},    {7, 5, 3},      {33, 257, 24},
                                           {100, 9, 17}, {300, 50, 200}, {0, 4, 8}};

TEST_P(EmbeddingTest, CopiesRows) {
  for (const auto& [tokens, vocabulary, hidden] : kCases)
    for (DType type : {DType::f32, DType::bf16})
      for (Layout layout : {Layout::contiguous, Layout::pitched}) {
        SCOPED_TRACE(fmt::format("{} tokens of {} hidden {} {}", tokens, vocabulary, hidden, name_of(type)));
        Workspace w(device());
        const Indices ids = some_ids(tokens, vocabulary);
        const Tensor ids_T = w.indices({tokens}, ids);
        const Tensor w_VD = w.input(type, {vocabulary, hidden}, normal_values(vocabulary * hidden, 1));
        const Tensor y_TD = w.output(type, {tokens, hidden}, layout);
        w.run([&] { ops().embedding(ids_T, w_VD, y_TD); });
        EXPECT_EQ(w.read(y_TD), reference::embedding(ids, w.read(w_VD), hidden));
      }
}

TEST_P(EmbeddingTest, GradientSumsTokensAndSkipsPadding) {
  for (const auto& [tokens, vocabulary, hidden] : kCases)
    for (int64_t padding : {int64_t(-1), vocabulary / 2})
      for (Write write : {Write::overwrite, Write::accumulate})
        for (DType type : {DType::f32, DType::bf16})
          for (DType gradient : {DType::f32, DType::bf16}) {
            SCOPED_TRACE(fmt::format("{} tokens of {} hidden {} padding {} write {} {} to {}", tokens, vocabulary,
                                     hidden, padding, int(write), name_of(type), name_of(gradient)));
            Workspace w(device());
            const Indices ids = some_ids(tokens, vocabulary);
            const Tensor ids_T = w.indices({tokens}, ids);
            const Tensor dy_TD = w.input(type, {tokens, hidden}, normal_values(tokens * hidden, 1));
            const Shape shape{vocabulary, hidden};
            const Tensor dw_VD = write == Write::overwrite
                                     ? w.output(gradient, shape)
                                     : w.in_out(gradient, shape, normal_values(vocabulary * hidden, 2));
            Values expected = reference::embedding_backward(ids, w.read(dy_TD), vocabulary, hidden, padding);
            if (write == Write::accumulate) expected = reference::sum(expected, w.read(dw_VD));
            w.run([&] { ops().embedding_backward(ids_T, dy_TD, dw_VD, padding, write); });
            EXPECT_TRUE(close(w.read(dw_VD), expected, tolerance_of(gradient)));
          }
}

// Few tokens that occur often: a token's sum may be shared out, and must still be the same each time.
TEST_P(EmbeddingTest, GradientOfFrequentTokens) {
  const int64_t tokens = 1500, vocabulary = 300;
  const std::vector<std::function<int64_t(int64_t)>> kinds = {
      [](int64_t) { return 7; },                           // one token alone
      [](int64_t t) { return t % 3 == 0 ? 299 : t % 3; },  // three in turn
      [](int64_t t) { return t < 500    ? 5
                             : t < 1100 ? 256
                                        : 0; },   // one after the other
      [](int64_t t) { return t % 4 == 0 ? t * 13 % 300 : 128; },    // one among many
      [](int64_t t) { return (t / 64) % 2 == 0 ? t / 64 : 255; }};  // at the edges of powers of two
  for (size_t kind = 0; kind < kinds.size(); ++kind)
    for (int64_t hidden : {5, 24})
      for (int64_t padding : {int64_t(-1), int64_t(5)})
        for (Write write : {Write::overwrite, Write::accumulate})
          for (DType type : {DType::f32, DType::bf16}) {
            SCOPED_TRACE(fmt::format("kind {} hidden {} padding {} write {} {}", kind, hidden, padding, int(write),
                                     name_of(type)));
            Workspace w(device());
            Indices ids;
            for (int64_t t = 0; t < tokens; ++t) ids.push_back(kinds[kind](t));
            const Tensor ids_T = w.indices({tokens}, ids);
            const Tensor dy_TD = w.input(type, {tokens, hidden}, normal_values(tokens * hidden, 1));
            const Shape shape{vocabulary, hidden};
            const Tensor dw_VD = write == Write::overwrite
                                     ? w.output(DType::f32, shape)
                                     : w.in_out(DType::f32, shape, normal_values(vocabulary * hidden, 2));
            Values expected = reference::embedding_backward(ids, w.read(dy_TD), vocabulary, hidden, padding);
            if (write == Write::accumulate) expected = reference::sum(expected, w.read(dw_VD));
            w.run([&] { ops().embedding_backward(ids_T, dy_TD, dw_VD, padding, write); });
            EXPECT_TRUE(close(w.read(dw_VD), expected, 1e-5));
          }
}

// <embedding(w), dy> = <w, embedding_backward(dy)>: the gradient is the adjoint of the lookup.
TEST_P(EmbeddingTest, GradientIsTheAdjoint) {
  const int64_t tokens = 40, vocabulary = 11, hidden = 9;
  Workspace w(device());
  const Tensor ids_T = w.indices({tokens}, some_ids(tokens, vocabulary));
  const Tensor w_VD = w.input(DType::f32, {vocabulary, hidden}, normal_values(vocabulary * hidden, 1));
  const Tensor dy_TD = w.input(DType::f32, {tokens, hidden}, normal_values(tokens * hidden, 2));
  const Tensor y_TD = w.output(DType::f32, {tokens, hidden}), dw_VD = w.output(DType::f32, {vocabulary, hidden});
  w.run([&] {
    ops().embedding(ids_T, w_VD, y_TD);
    ops().embedding_backward(ids_T, dy_TD, dw_VD, -1, Write::overwrite);
  });
  const double forward = reference::dot(w.read(y_TD), w.read(dy_TD));
  EXPECT_NEAR(forward, reference::dot(w.read(w_VD), w.read(dw_VD)), 1e-5 * std::abs(forward));
}

}  // namespace
}  // namespace optimus::test
