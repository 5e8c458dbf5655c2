// Tensors of more than 2^31 elements: sampled rows agree with the fp64 reference. Gigabytes, so only where a GPU is.
#include "optimus/tensor/arena.h"
#include "support/backends.h"
#include "support/reference.h"

namespace optimus::test {
namespace {

constexpr int64_t kColumns = 4096, kRows = (int64_t(1) << 31) / kColumns + 1024;  // 2^31 + 4 Mi elements

class LargeTest : public OpsTest {
 protected:
  void SetUp() override {
    if (device().kind() == DeviceKind::cpu) GTEST_SKIP() << "gigabytes, for a GPU";
    arena_.emplace(device(), "large", int64_t(40) << 30);
  }
  Tensor normal(DType dtype, Shape shape, uint64_t stream) {
    const Tensor x = arena_->allocate(dtype, shape, "x");
    ops().fill_normal(x.reshape({x.elements()}), 1.0f, philox_for(1, "large"), stream, 0);
    return x;
  }
  Tensor make(DType dtype, Shape shape) { return arena_->allocate(dtype, shape, "y"); }
  Tensor indices(const std::vector<int32_t>& values) {
    const Tensor x = make(DType::i32, {int64_t(values.size())});
    device().from_host(x, values.data());
    return x;
  }
  Values read(const Tensor& row) {
    Bytes bytes(size_t(row.bytes()));
    device().to_host_wait(bytes.data(), row);
    Values out;
    for (int64_t i = 0; i < row.elements(); ++i)
      out.push_back(detail::decode(row.dtype, &bytes[size_t(i * size_of(row.dtype))]));
    return out;
  }
  Values row(const Tensor& x, int64_t i) { return read(x.slice(i, 1)); }

  std::optional<Arena> arena_;
};
OPTIMUS_ON_EVERY_BACKEND(LargeTest);

const Indices kSampled{0, 1, kRows / 2, kRows - 1500, kRows - 1025, kRows - 1024, kRows - 1};

TEST_P(LargeTest, ElementwiseAndNorms) {
  const Shape shape{kRows, kColumns};
  const Tensor x = normal(DType::bf16, shape, 1), y = make(DType::bf16, shape),
               statistics = make(DType::f32, {kRows, 2});
  const Tensor weight = normal(DType::bf16, {kColumns}, 2);
  ops().add(x, x, y);
  for (int64_t i : kSampled) EXPECT_EQ(row(y, i), reference::sum(row(x, i), row(x, i))) << i;
  ops().norm(NormKind::rms, 1e-5f, 1, x, weight, {}, {}, y, statistics);
  for (int64_t i : kSampled)
    EXPECT_TRUE(
        close(row(y, i), reference::norm({NormKind::rms, 1e-5, 1, kColumns}, row(x, i), read(weight), {}).y, 1e-2))
        << i;
  const Tensor dweight = make(DType::f32, {kColumns});
  ops().norm_backward(NormKind::rms, 1, x, weight, statistics, x, {}, y, dweight, {}, Write::overwrite);
  for (int64_t i : kSampled)
    EXPECT_TRUE(close(
        row(y, i), reference::norm_backward({NormKind::rms, 1e-5, 1, kColumns}, row(x, i), read(weight), row(x, i)).dx,
        1e-2))
        << i;
}

TEST_P(LargeTest, RoutedRows) {
  const int64_t tokens = 4100, rows = kRows;
  std::vector<int32_t> ids(static_cast<size_t>(rows));
  const int64_t top_k = rows / tokens;  // 128
  for (int64_t i = 0; i < tokens * top_k; ++i) ids[size_t(i)] = int32_t(i % top_k);
  const int64_t routed = tokens * top_k;
  const Tensor choice = indices(std::vector<int32_t>(ids.begin(), ids.begin() + routed)).reshape({tokens, top_k});
  const RouteIndex index{make(DType::i32, {top_k + 1}), make(DType::i32, {routed}), make(DType::i32, {routed}),
                         make(DType::i32, {tokens + 1}), make(DType::i32, {routed})};
  ops().route(choice, 0, 0, index);
  const Tensor x = normal(DType::bf16, {tokens, kColumns}, 1), gathered = make(DType::bf16, {routed, kColumns});
  ops().gather_rows(x, index, gathered);  // row e * tokens + t is token t
  for (int64_t i : {int64_t(0), routed / 2 + 77, routed - 1}) EXPECT_EQ(row(gathered, i), row(x, i % tokens)) << i;
  const Tensor y = make(DType::bf16, {tokens, kColumns});
  ops().combine_rows(gathered, index, {}, y);
  for (int64_t t : {int64_t(0), int64_t(1000), tokens - 1}) {
    Values expected = row(x, t);
    for (double& value : expected) value *= double(top_k);
    EXPECT_TRUE(close(row(y, t), expected, 1e-2)) << t;
  }
  const int64_t width = kColumns / 2;
  const Tensor a = make(DType::bf16, {routed, width}), w = normal(DType::bf16, {top_k, 64, kColumns}, 3);
  ops().swiglu(gathered, {}, {}, {}, a);
  for (int64_t i : {int64_t(0), routed - 1}) {
    const Values h = row(gathered, i);
    Values expected;
    for (int64_t f = 0; f < width; ++f)
      expected.push_back(h[size_t(f)] / (1 + std::exp(-h[size_t(f)])) * h[size_t(f + width)]);
    EXPECT_TRUE(close(row(a, i), expected, 1e-2)) << i;
  }
  const Tensor product = make(DType::bf16, {routed, 64});
  ops().grouped_matmul(gathered, w, index, product);
  for (int64_t i : {int64_t(5), routed - 1})
    EXPECT_TRUE(close(row(product, i),
                      reference::matmul(row(gathered, i), Transpose::no, read(w[i / tokens].matrix()), Transpose::yes,
                                        1, 64, kColumns),
                      1e-2))
        << i;
}

TEST_P(LargeTest, LogitsAndTheirLoss) {
  const int64_t vocab = 50304, tokens = (int64_t(1) << 31) / vocab + 500, hidden = 64;
  const Tensor x = normal(DType::bf16, {tokens, hidden}, 1), w = normal(DType::bf16, {vocab, hidden}, 2);
  const Tensor logits = make(DType::bf16, {tokens, vocab});
  ops().matmul(x, Transpose::no, w, Transpose::yes, logits, {});
  const Values weights = read(w.matrix());
  for (int64_t t : {int64_t(0), tokens - 1})
    EXPECT_TRUE(close(row(logits, t),
                      reference::matmul(row(x, t), Transpose::no, weights, Transpose::yes, 1, vocab, hidden), 1e-2))
        << t;
  const Tensor targets = make(DType::i32, {tokens}), ones = make(DType::f32, {tokens}), loss = make(DType::f64, {1});
  ops().fill(targets, 7);
  ops().fill(ones, 1);
  ops().fill(loss, 0);
  const Values before = row(logits, tokens - 1);
  ops().cross_entropy(logits, targets, ones, 1.0f, loss);
  Values expected;
  double sum = 0;
  for (double logit : before) sum += std::exp(logit - before[0]);
  for (size_t v = 0; v < before.size(); ++v) expected.push_back(std::exp(before[v] - before[0]) / sum - (v == 7));
  EXPECT_TRUE(close(row(logits, tokens - 1), expected, 1e-2));
}

TEST_P(LargeTest, FlatBuffers) {
  const int64_t count = (int64_t(1) << 31) + 12345;
  const Tensor gradient = normal(DType::f32, {count}, 1), weight = normal(DType::bf16, {count}, 2);
  const Tensor remainder = make(DType::i16, {count}), m = make(DType::bf16, {count}), v = make(DType::bf16, {count});
  const Tensor squares = make(DType::f64, {1}), control = make(DType::f32, {kControlSize});
  ops().fill(squares, 0);
  ops().sum_squares(gradient, squares);
  EXPECT_NEAR(read(squares)[0] / double(count), 1.0, 1e-3);
  for (const Tensor& state : {remainder, m, v}) ops().fill(state, 0);
  const float values[kControlSize] = {0.5f, 0.1f, 0.05f, 1.0f, 1.0f, 0.0f};
  device().from_host(control, values);
  const Tensor last = weight.slice(count - 1, 1), first = weight.slice(0, 1);
  const Values before = {read(first)[0], read(last)[0]};
  ops().adamw({0.9f, 0.95f, 1e-8f, 0.0f, philox_for(1, "moments")}, control, gradient, remainder, m, v, weight);
  const Values signs = {read(gradient.slice(0, 1))[0], read(gradient.slice(count - 1, 1))[0]};
  EXPECT_NEAR(read(first)[0], before[0] - std::copysign(0.5, signs[0]), 0.02);  // the first update is lr * sign
  EXPECT_NEAR(read(last)[0], before[1] - std::copysign(0.5, signs[1]), 0.02);
}

}  // namespace
}  // namespace optimus::test
