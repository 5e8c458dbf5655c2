// Rotary embedding and attention, forward and backward.
#include "support/backends.h"
#include "support/reference.h"

namespace optimus::test {
namespace {

using RopeTest = OpsTest;
using AttentionTest = OpsTest;
OPTIMUS_ON_EVERY_BACKEND(RopeTest);
OPTIMUS_ON_EVERY_BACKEND(AttentionTest);

Indices positions_of(int64_t tokens, int64_t stride) {
  Indices out;
  for (int64_t t = 0; t < tokens; ++t) out.push_back(t * stride);
  return out;
}

TEST_P(RopeTest, TurnsPairsOfHalves) {
  const std::vector<std::array<int64_t, 3>> shapes = {{1, 1, 2},   {9, 3, 16},   {5, 2, 24}, {33, 1, 64},
                                                      {4, 2, 128}, {200, 3, 32}, {0, 2, 8}};
  for (const auto& [tokens, heads, width] : shapes)
    for (RopeDirection direction : {RopeDirection::forward, RopeDirection::backward})
      for (DType type : {DType::f32, DType::bf16})
        for (Layout layout : {Layout::contiguous, Layout::pitched})
          for (bool in_place : {false, true}) {
            SCOPED_TRACE(fmt::format("tokens {} heads {} width {} direction {} {} in place {}", tokens, heads, width,
                                     int(direction), name_of(type), in_place));
            Workspace w(device());
            const Shape shape{tokens, heads * width};
            const Values values = normal_values(shape.elements(), 1);
            const Indices positions = positions_of(tokens, 1);
            const Tensor positions_T = w.indices({tokens}, positions);
            const Tensor x = in_place ? w.in_out(type, shape, values, layout) : w.input(type, shape, values, layout);
            const Tensor y = in_place ? x : w.output(type, shape, layout);
            const Values expected = reference::rope(w.read(x), positions, heads, 1e4, direction);
            w.run([&] { ops().rope(x, positions_T, heads, 1e4f, direction, y); });
            EXPECT_TRUE(close(w.read(y), expected, tolerance_of(type)));
          }
}

// Thousands of radians in f32 leave an angle about 5e-4 of accuracy.
TEST_P(RopeTest, FarPositionsOfSeveralThetas) {
  const int64_t tokens = 17, heads = 2, width = 32;
  const Indices positions = positions_of(tokens, 241);
  for (float theta : {1e4f, 5e5f}) {
    Workspace w(device());
    const Tensor positions_T = w.indices({tokens}, positions);
    const Tensor x = w.input(DType::f32, {tokens, heads * width}, normal_values(tokens * heads * width, 1));
    const Tensor y = w.output(DType::f32, {tokens, heads * width});
    w.run([&] { ops().rope(x, positions_T, heads, theta, RopeDirection::forward, y); });
    const Values expected = reference::rope(w.read(x), positions, heads, theta, RopeDirection::forward);
    EXPECT_TRUE(close(w.read(y), expected, 5e-4)) << "theta " << theta;
  }
}

TEST_P(RopeTest, BackwardUndoesForward) {
  const int64_t tokens = 50, heads = 3, width = 24;
  Workspace w(device());
  const Tensor positions_T = w.indices({tokens}, positions_of(tokens, 37));
  const Tensor x = w.input(DType::f32, {tokens, heads * width}, normal_values(tokens * heads * width, 1));
  const Tensor y = w.output(DType::f32, {tokens, heads * width}), back = w.output(DType::f32, {tokens, heads * width});
  w.run([&] {
    ops().rope(x, positions_T, heads, 1e4f, RopeDirection::forward, y);
    ops().rope(y, positions_T, heads, 1e4f, RopeDirection::backward, back);
  });
  EXPECT_TRUE(close(w.read(back), w.read(x), 1e-6));
}

std::vector<AttentionShape> attention_shapes() {
  std::vector<AttentionShape> out;
  const auto add = [&](int64_t sequences, int64_t queries, int64_t keys, int64_t heads, int64_t kv_heads,
                       int64_t width) {
    for (bool causal : {false, true})
      out.push_back({sequences, queries, keys, heads, kv_heads, width, causal, 1 / std::sqrt(float(width))});
  };
  add(1, 1, 1, 1, 1, 16);
  add(2, 7, 7, 4, 2, 16);    // grouped queries
  add(1, 19, 19, 3, 1, 24);  // one kv head, odd sizes
  add(3, 5, 12, 2, 2, 32);   // queries continue a longer context
  add(1, 1, 33, 4, 4, 64);   // one decoded token
  add(1, 67, 67, 2, 1, 64);
  add(1, 130, 130, 2, 2, 16);  // several tiles of queries
  add(1, 30, 520, 1, 1, 16);   // several tiles of keys
  add(2, 9, 9, 2, 1, 128);
  add(2, 128, 128, 4, 2, 64);  // whole tiles
  add(1, 200, 200, 2, 2, 128);
  add(1, 64, 192, 2, 1, 128);
  add(1, 33, 33, 1, 1, 256);
  add(1, 68, 68, 2, 1, 64);
  add(1, 64, 192, 4, 4, 128);
  add(1, 100, 332, 4, 2, 72);
  add(0, 4, 4, 2, 1, 16);
  return out;
}

std::string text_of(const AttentionShape& s, DType type) {
  return fmt::format("B {} queries {} keys {} heads {}/{} width {} causal {} {}", s.sequences, s.queries, s.keys,
                     s.heads, s.kv_heads, s.head_dim, s.causal, name_of(type));
}

struct AttentionInputs {
  Tensor q, k, v;
};
AttentionInputs inputs_of(Workspace& w, const AttentionShape& s, DType type, Layout layout, double size = 1) {
  const Shape q{s.sequences * s.queries, s.heads * s.head_dim}, k{s.sequences * s.keys, s.kv_heads * s.head_dim};
  return {w.input(type, q, normal_values(q.elements(), 1, 0, size), layout),
          w.input(type, k, normal_values(k.elements(), 2, 0, size), layout),
          w.input(type, k, normal_values(k.elements(), 3), layout)};
}

Tensor scratch_of(Workspace& w, Ops& ops, const AttentionShape& s, DType type) {
  const int64_t bytes = ops.attention_scratch_bytes(s, type);
  return bytes > 0 ? w.output(DType::f32, {bytes / 4}) : Tensor{};
}

void check_forward(Device& device, Ops& ops, const AttentionShape& s, DType type, Layout layout, double size) {
  SCOPED_TRACE(text_of(s, type) + fmt::format(" inputs times {}", size));
  Workspace w(device);
  const auto [q, k, v] = inputs_of(w, s, type, layout, size);
  const Tensor o = w.output(type, q.shape, layout), o_without_lse = w.output(type, q.shape, layout);
  const Tensor lse = w.output(DType::f32, {s.sequences, s.heads, s.queries});
  w.run([&] {
    ops.attention(s, q, k, v, o, lse);
    ops.attention(s, q, k, v, o_without_lse, {});
  });
  const auto expected = reference::attention(s, w.read(q), w.read(k), w.read(v));
  EXPECT_TRUE(close(w.read(o), expected.o, tolerance_of(type))) << "o";
  EXPECT_TRUE(close(w.read(o_without_lse), expected.o, tolerance_of(type))) << "o without lse";
  EXPECT_TRUE(close(w.read(lse), expected.lse, tolerance_of(type))) << "lse";
}

void check_backward(Device& device, Ops& ops, const AttentionShape& s, DType type, Layout layout) {
  SCOPED_TRACE(text_of(s, type));
  Workspace w(device);
  const auto [q, k, v] = inputs_of(w, s, type, layout);
  const auto forward = reference::attention(s, w.read(q), w.read(k), w.read(v));
  const Shape per_head{s.sequences, s.heads, s.queries};
  const Tensor o = w.input(type, q.shape, forward.o, layout), lse = w.input(DType::f32, per_head, forward.lse);
  const Tensor do_ = w.input(type, q.shape, normal_values(q.elements(), 4), layout);
  const Tensor dq = w.output(type, q.shape, layout), dk = w.output(type, k.shape, layout),
               dv = w.output(type, v.shape, layout), scratch = scratch_of(w, ops, s, type);
  w.run([&] { ops.attention_backward(s, q, k, v, o, lse, do_, dq, dk, dv, scratch); });
  const auto expected = reference::attention_backward(s, w.read(q), w.read(k), w.read(v), w.read(do_));
  // A single key's score has no gradient: what is compared with zero is the rounding of `o`, summed over the head.
  const double tolerance = s.keys == 1 && type == DType::bf16 ? 5e-2 : tolerance_of(type);
  EXPECT_TRUE(close(w.read(dq), expected.dq, tolerance)) << "dq";
  EXPECT_TRUE(close(w.read(dk), expected.dk, tolerance)) << "dk";
  EXPECT_TRUE(close(w.read(dv), expected.dv, tolerance_of(type))) << "dv";
}

TEST_P(AttentionTest, Forward) {
  for (const AttentionShape& shape : attention_shapes())
    for (DType type : {DType::f32, DType::bf16})
      for (Layout layout : {Layout::contiguous, Layout::pitched})
        check_forward(device(), ops(), shape, type, layout, 1);
}

// Scores in the hundreds: exponentials must be taken relative to the row's maximum.
TEST_P(AttentionTest, LargeScores) {
  for (bool causal : {false, true})
    check_forward(device(), ops(), {2, 40, 40, 2, 1, 16, causal, 1.0f}, DType::f32, Layout::contiguous, 6);
}

TEST_P(AttentionTest, Backward) {
  for (const AttentionShape& shape : attention_shapes())
    for (DType type : {DType::f32, DType::bf16})
      for (Layout layout : {Layout::contiguous, Layout::pitched}) check_backward(device(), ops(), shape, type, layout);
}

// The model's layout: q, k, v are columns of one fused tensor, and so are their gradients.
TEST_P(AttentionTest, FusedColumns) {
  const AttentionShape s{2, 13, 13, 4, 2, 16, true, 0.25f};
  const int64_t tokens = s.sequences * s.queries, q_columns = s.heads * s.head_dim, k_columns = s.kv_heads * s.head_dim;
  const auto split = [&](const Tensor& qkv) {
    return std::array{qkv.column_slice(0, q_columns), qkv.column_slice(q_columns, k_columns),
                      qkv.column_slice(q_columns + k_columns, k_columns)};
  };
  Workspace w(device());
  const Shape shape{tokens, q_columns + 2 * k_columns};
  const Tensor qkv = w.input(DType::f32, shape, normal_values(shape.elements(), 1)), dqkv = w.output(DType::f32, shape);
  const Tensor o = w.output(DType::f32, {tokens, q_columns}),
               lse = w.output(DType::f32, {s.sequences, s.heads, s.queries});
  const Tensor do_ = w.input(DType::f32, {tokens, q_columns}, normal_values(tokens * q_columns, 2));
  const Tensor scratch = scratch_of(w, ops(), s, DType::f32);
  const auto [q, k, v] = split(qkv);
  const auto [dq, dk, dv] = split(dqkv);
  w.run([&, q = q, k = k, v = v, dq = dq, dk = dk, dv = dv] {
    ops().attention(s, q, k, v, o, lse);
    ops().attention_backward(s, q, k, v, o, lse, do_, dq, dk, dv, scratch);
  });
  const auto expected = reference::attention_backward(s, w.read(q), w.read(k), w.read(v), w.read(do_));
  EXPECT_TRUE(close(w.read(o), reference::attention(s, w.read(q), w.read(k), w.read(v)).o, 1e-5)) << "o";
  EXPECT_TRUE(close(w.read(dq), expected.dq, 1e-5)) << "dq";
  EXPECT_TRUE(close(w.read(dk), expected.dk, 1e-5)) << "dk";
  EXPECT_TRUE(close(w.read(dv), expected.dv, 1e-5)) << "dv";
}

TEST_P(AttentionTest, GradientAgreesWithCentralDifferences) {
  for (bool causal : {false, true}) {
    SCOPED_TRACE(causal ? "causal" : "full");
    const AttentionShape s{2, 4, 6, 4, 2, 16, causal, 0.25f};
    Workspace w(device());
    const auto [q, k, v] = inputs_of(w, s, DType::f32, Layout::contiguous);
    const Tensor o = w.output(DType::f32, q.shape), dq = w.output(DType::f32, q.shape);
    const Tensor dk = w.output(DType::f32, k.shape), dv = w.output(DType::f32, v.shape);
    const Tensor do_ = w.input(DType::f32, q.shape, normal_values(q.elements(), 4));
    const Tensor lse = w.output(DType::f32, {2, 4, 4}), scratch = scratch_of(w, ops(), s, DType::f32);
    w.run([&, q = q, k = k, v = v] {
      ops().attention(s, q, k, v, o, lse);
      ops().attention_backward(s, q, k, v, o, lse, do_, dq, dk, dv, scratch);
    });
    const Values qs = w.read(q), ks = w.read(k), vs = w.read(v), dos = w.read(do_);
    using reference::attention, reference::dot, reference::numeric_gradient;
    const Values by_q = numeric_gradient([&](const Values& x) { return dot(attention(s, x, ks, vs).o, dos); }, qs);
    const Values by_k = numeric_gradient([&](const Values& x) { return dot(attention(s, qs, x, vs).o, dos); }, ks);
    const Values by_v = numeric_gradient([&](const Values& x) { return dot(attention(s, qs, ks, x).o, dos); }, vs);
    EXPECT_TRUE(close(w.read(dq), by_q, 1e-4)) << "dq";
    EXPECT_TRUE(close(w.read(dk), by_k, 1e-4)) << "dk";
    EXPECT_TRUE(close(w.read(dv), by_v, 1e-4)) << "dv";
  }
}

}  // namespace
}  // namespace optimus::test
