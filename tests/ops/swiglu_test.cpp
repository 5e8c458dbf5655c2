// The gated activation a = silu(h_gate) * h_up * router gate, and its gradients.
#include "support/backends.h"
#include "support/reference.h"

namespace optimus::test {
namespace {

using SwigluTest = OpsTest;
OPTIMUS_ON_EVERY_BACKEND(SwigluTest);

struct SwigluCase {
  int64_t capacity, rows, width;  ///< rows < capacity: bounded by the device's row count
  bool gated;
  DType type;
  Layout layout = Layout::contiguous;
  std::string text() const {
    return fmt::format("rows {} of {} width {} gated {} {} {}", rows, capacity, width, gated, name_of(type),
                       layout == Layout::pitched ? "pitched" : "");
  }
};

/// The flat (token, k) slot of each row: scattered over a table with room for slots of other ranks' experts.
Indices slots_of(const SwigluCase& c) {
  Indices out;
  for (int64_t r = 0; r < c.capacity; ++r) out.push_back((r * 2 + 5) % (2 * c.capacity + 1));
  return out;
}

struct SwigluInputs {
  Tensor h, gates, slots, rows;
  Values gate_R;  ///< of each bounded row
};
SwigluInputs inputs_of(Workspace& w, const SwigluCase& c, bool h_writable) {
  SwigluInputs out;
  Values h = normal_values(c.capacity * 2 * c.width, 1, 0, 2);
  const Shape shape{c.capacity, 2 * c.width};
  out.h = h_writable ? w.in_out(c.type, shape, h, c.layout) : w.input(c.type, shape, h, c.layout);
  out.gate_R = Values(size_t(c.rows), 1.0);
  if (c.gated) {
    Values gates = normal_values(2 * c.capacity + 1, 2);
    gates[size_t(slots_of(c)[0])] = 0;  // a gate may be zero: nothing divides by it
    out.gates = w.input(DType::f32, {int64_t(gates.size())}, gates);
    out.slots = w.indices({c.capacity}, slots_of(c));
    const Values rounded = w.read(out.gates);
    for (int64_t r = 0; r < c.rows; ++r) out.gate_R[size_t(r)] = rounded[size_t(slots_of(c)[size_t(r)])];
  }
  if (c.rows < c.capacity) out.rows = w.indices({1}, {c.rows});
  return out;
}

std::vector<SwigluCase> cases() {
  std::vector<SwigluCase> out;
  const std::vector<std::array<int64_t, 3>> shapes = {{1, 1, 1},      {7, 7, 33}, {40, 40, 16}, {40, 29, 24},
                                                      {300, 290, 64}, {12, 0, 8}, {0, 0, 8}};
  for (const auto& [capacity, rows, width] : shapes)
    for (bool gated : {false, true})
      for (DType type : {DType::f32, DType::bf16})
        for (Layout layout : {Layout::contiguous, Layout::pitched})
          if (capacity > 0 || !gated) out.push_back({capacity, rows, width, gated, type, layout});
  return out;
}

TEST_P(SwigluTest, Forward) {
  for (const SwigluCase& c : cases()) {
    SCOPED_TRACE(c.text());
    Workspace w(device());
    const SwigluInputs in = inputs_of(w, c, false);
    const Tensor a = w.output(c.type, {c.capacity, c.width}, c.layout);
    w.run([&] { ops().swiglu(in.h, in.gates, in.slots, in.rows, a); });
    const Values expected = reference::swiglu(w.read(in.h.slice(0, c.rows)), in.gate_R, c.width);
    EXPECT_TRUE(close(w.read(a.slice(0, c.rows)), expected, tolerance_of(c.type)));
    EXPECT_TRUE(w.untouched(a.slice(c.rows, c.capacity - c.rows))) << "rows past the bound";
  }
}

TEST_P(SwigluTest, Backward) {
  for (const SwigluCase& c : cases())
    for (bool in_place : {false, true})
      for (bool recompute : {false, true}) {
        SCOPED_TRACE(c.text() + fmt::format(" in place {} recomputes a {}", in_place, recompute));
        Workspace w(device());
        const SwigluInputs in = inputs_of(w, c, in_place);
        const Tensor da = w.input(c.type, {c.capacity, c.width}, normal_values(c.capacity * c.width, 3), c.layout);
        const Tensor dh = in_place ? in.h : w.output(c.type, in.h.shape, c.layout);
        const Tensor a = recompute ? w.output(c.type, da.shape, c.layout) : Tensor();
        const Tensor dgates = c.gated ? w.output(DType::f32, in.gates.shape) : Tensor();
        const Values h = w.read(in.h.slice(0, c.rows));
        w.run([&] { ops().swiglu_backward(in.h, da, in.gates, in.slots, in.rows, dh, a, dgates); });

        const auto expected = reference::swiglu_backward(h, w.read(da.slice(0, c.rows)), in.gate_R, c.width);
        EXPECT_TRUE(close(w.read(dh.slice(0, c.rows)), expected.dh, tolerance_of(c.type))) << "dh";
        if (recompute) {
          EXPECT_TRUE(close(w.read(a.slice(0, c.rows)), reference::swiglu(h, in.gate_R, c.width), tolerance_of(c.type)))
              << "a";
        }
        if (!c.gated) continue;
        Values dgate_R;
        for (int64_t r = 0; r < c.rows; ++r) dgate_R.push_back(w.read(dgates)[size_t(slots_of(c)[size_t(r)])]);
        EXPECT_TRUE(close(dgate_R, expected.dgate_R, tolerance_of(c.type))) << "dgates";
        int64_t others = 0;
        for (int64_t slot = 0; slot < dgates.elements(); ++slot) others += w.untouched(dgates.slice(slot, 1));
        EXPECT_EQ(others, dgates.elements() - c.rows) << "slots without a row";
      }
}

// A row count of zero on the device, whatever the buffers hold: nothing is written.
TEST_P(SwigluTest, NoRows) {
  for (int64_t capacity : {0, 5})
    for (DType type : {DType::f32, DType::bf16}) {
      SCOPED_TRACE(fmt::format("capacity {} {}", capacity, name_of(type)));
      Workspace w(device());
      const int64_t width = 3;
      const Tensor h = w.input(type, {capacity, 2 * width}, Values(size_t(capacity * 2 * width), NAN));
      const Tensor da = w.input(type, {capacity, width}, Values(size_t(capacity * width), NAN));
      const Tensor gates = w.input(DType::f32, {4}, {1, 2, 3, 4}), rows = w.indices({1}, {0});
      const Tensor slots = w.indices({capacity}, Indices(size_t(capacity), -1));
      const Tensor a = w.output(type, da.shape), dh = w.output(type, h.shape), dgates = w.output(DType::f32, {4});
      w.run([&] {
        ops().swiglu(h, gates, slots, rows, a);
        ops().swiglu_backward(h, da, gates, slots, rows, dh, a, dgates);
      });
      for (const Tensor& output : {a, dh, dgates}) EXPECT_TRUE(w.untouched(output));
    }
}

// silu far from zero: exp(100) must not turn the result into NaN.
TEST_P(SwigluTest, Saturates) {
  Workspace w(device());
  const Tensor h = w.input(DType::f32, {4, 2}, {100, 3, -100, 3, 1e4, 3, -1e4, 3});
  const Tensor da = w.input(DType::f32, {4, 1}, {1, 1, 1, 1});
  const Tensor a = w.output(DType::f32, {4, 1}), dh = w.output(DType::f32, {4, 2});
  w.run([&] {
    ops().swiglu(h, {}, {}, {}, a);
    ops().swiglu_backward(h, da, {}, {}, {}, dh, {}, {});
  });
  EXPECT_TRUE(close(w.read(a), {300, 0, 3e4, 0}, 1e-6));
  EXPECT_TRUE(close(w.read(dh), {3, 100, 0, 0, 3, 1e4, 0, 0}, 1e-6));
}

TEST_P(SwigluTest, GradientAgreesWithCentralDifferences) {
  const SwigluCase c{6, 6, 9, true, DType::f32};
  Workspace w(device());
  const SwigluInputs in = inputs_of(w, c, false);
  const Tensor da = w.input(DType::f32, {6, 9}, normal_values(54, 3)), dh = w.output(DType::f32, {6, 18});
  const Tensor dgates = w.output(DType::f32, in.gates.shape);
  w.run([&] { ops().swiglu_backward(in.h, da, in.gates, in.slots, in.rows, dh, {}, dgates); });
  const Values h = w.read(in.h), das = w.read(da);
  using reference::dot, reference::numeric_gradient, reference::swiglu;
  const Values by_h = numeric_gradient([&](const Values& x) { return dot(swiglu(x, in.gate_R, 9), das); }, h);
  const Values by_gate = numeric_gradient([&](const Values& x) { return dot(swiglu(h, x, 9), das); }, in.gate_R);
  Values dgate_R;
  for (int64_t slot : slots_of(c)) dgate_R.push_back(w.read(dgates)[size_t(slot)]);
  EXPECT_TRUE(close(w.read(dh), by_h, 1e-4)) << "dh";
  EXPECT_TRUE(close(dgate_R, by_gate, 1e-4)) << "dgates";
}

}  // namespace
}  // namespace optimus::test
