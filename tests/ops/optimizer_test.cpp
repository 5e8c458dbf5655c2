// The update: sum of squares, clip coefficient and finite flag, AdamW.
#include "support/backends.h"
#include "support/reference.h"

namespace optimus::test {
namespace {

using OptimizerTest = OpsTest;
OPTIMUS_ON_EVERY_BACKEND(OptimizerTest);

constexpr AdamwConstants kConstants{0.9f, 0.95f, 1e-8f, 0.1f};

TEST_P(OptimizerTest, SumOfSquaresIsAddedInDouble) {
  for (int64_t count : {0, 1, 7, 64, 1003, 20000})
    for (DType type : {DType::f32, DType::bf16}) {
      SCOPED_TRACE(fmt::format("{} of {}", count, name_of(type)));
      Workspace w(device());
      const Tensor x = w.input(type, {count}, normal_values(count, 1, 100, 1));
      const Tensor out = w.in_out(DType::f64, {1}, {3});
      w.run([&] { ops().sum_squares(x, out); });
      const double expected = 3 + reference::dot(w.read(x), w.read(x));
      EXPECT_NEAR(w.read(out)[0], expected, 1e-9 * expected);  // a sum in f32 would be off by 1e-7 at least
    }
}

Values clip_control(Device& device, Ops& ops, double squares, double loss, float clip_norm) {
  Workspace w(device);
  const Tensor squares_1 = w.input(DType::f64, {1}, {squares}), loss_1 = w.input(DType::f64, {1}, {loss});
  const Tensor control = w.in_out(DType::f32, {kControlSize}, Values(kControlSize, 7));
  w.run([&] { ops.clip_control(squares_1, loss_1, clip_norm, control); });
  const Values out = w.read(control);
  for (int slot : {kLearningRate, kCorrection1, kCorrection2}) EXPECT_EQ(out[size_t(slot)], 7) << "slot " << slot;
  return out;
}

TEST_P(OptimizerTest, ClipCoefficient) {
  const Values large = clip_control(device(), ops(), 16, 1, 1);
  EXPECT_FLOAT_EQ(float(large[kGradientNorm]), 4);
  EXPECT_NEAR(large[kClip], 1 / (4 + 1e-6), 1e-7);
  EXPECT_EQ(large[kFinite], 1);
  EXPECT_EQ(clip_control(device(), ops(), 0.25, 1, 1)[kClip], 1) << "a small gradient is not enlarged";
  EXPECT_EQ(clip_control(device(), ops(), 16, 1, 0)[kClip], 1) << "clip_norm 0 clips nothing";
  EXPECT_EQ(clip_control(device(), ops(), 16, 1, 0)[kGradientNorm], 4);
  EXPECT_EQ(clip_control(device(), ops(), 0, 1, 1)[kClip], 1) << "a zero gradient";
}

TEST_P(OptimizerTest, FiniteFlag) {
  const double infinity = std::numeric_limits<double>::infinity();
  for (double bad : {double(NAN), infinity, -infinity}) {
    EXPECT_EQ(clip_control(device(), ops(), 1, bad, 1)[kFinite], 0) << "loss " << bad;
    EXPECT_EQ(clip_control(device(), ops(), bad, 1, 1)[kFinite], 0) << "squares " << bad;
  }
}

struct AdamwCase {
  int64_t count;
  DType gradient, moments, weight;
  bool weight_is_master;
};

std::vector<AdamwCase> adamw_cases() {
  std::vector<AdamwCase> out;
  for (int64_t count : {0, 1, 7, 8, 1003, 40000})
    for (DType gradient : {DType::f32, DType::bf16})
      for (DType moments : {DType::f32, DType::bf16}) {
        out.push_back({count, gradient, moments, DType::f32, true});
        out.push_back({count, gradient, moments, DType::f32, false});
        out.push_back({count, gradient, moments, DType::bf16, false});
      }
  return out;
}

struct AdamwTensors {
  Tensor control, gradient, master, m, v, weight;
};
AdamwTensors make_tensors(Workspace& w, const AdamwCase& c, const Values& control, Values gradient) {
  const Shape shape{c.count};
  Values v = normal_values(c.count, 4, 0, 1e-2);
  for (double& value : v) value *= value;
  AdamwTensors out{w.input(DType::f32, {kControlSize}, control),
                   w.input(c.gradient, shape, gradient),
                   w.in_out(DType::f32, shape, normal_values(c.count, 2)),
                   w.in_out(c.moments, shape, normal_values(c.count, 3, 0, 1e-2)),
                   w.in_out(c.moments, shape, v),
                   {}};
  out.weight = c.weight_is_master ? out.master : w.in_out(c.weight, shape, Values(size_t(c.count), 5));
  return out;
}

TEST_P(OptimizerTest, AdamwMatchesReference) {
  const Values control = {3e-3, 1 - std::pow(0.9, 3), 1 - std::pow(0.95, 3), 0.6, 1, 2};
  for (const AdamwCase& c : adamw_cases()) {
    SCOPED_TRACE(fmt::format("{} gradient {} moments {} weight {} is master {}", c.count, name_of(c.gradient),
                             name_of(c.moments), name_of(c.weight), c.weight_is_master));
    Workspace w(device());
    const auto [control_tensor, gradient, master, m, v, weight] =
        make_tensors(w, c, control, normal_values(c.count, 1, 0, 1e-2));
    reference::AdamwState expected{w.read(master), w.read(m), w.read(v)};
    const Values before = expected.master;
    reference::adamw(kConstants, {control[kLearningRate], control[kCorrection1], control[kCorrection2], control[kClip]},
                     w.read(gradient), expected);
    w.run([&, &control_tensor = control_tensor, &gradient = gradient, &master = master, &m = m, &v = v,
           &weight = weight] { ops().adamw(kConstants, control_tensor, gradient, master, m, v, weight); });
    EXPECT_TRUE(close(w.read(m), expected.m, tolerance_of(c.moments))) << "m";
    EXPECT_TRUE(close(w.read(v), expected.v, tolerance_of(c.moments))) << "v";
    EXPECT_TRUE(close(w.read(master), expected.master, 1e-6)) << "master";
    Values step = w.read(master), expected_step = expected.master;
    for (size_t i = 0; i < before.size(); ++i) step[i] -= before[i], expected_step[i] -= before[i];
    EXPECT_TRUE(close(step, expected_step, 1e-4)) << "the update itself";
    Values rounded = w.read(master);
    if (c.weight == DType::bf16)
      for (double& value : rounded) value = double(float(bf16(float(value))));
    EXPECT_EQ(w.read(weight), rounded) << "weight is not the rounded master";
  }
}

// A step with a loss or gradient that is not finite leaves everything as it is, whatever the gradient holds.
TEST_P(OptimizerTest, AdamwDoesNothingWithoutTheFiniteFlag) {
  for (const AdamwCase& c : adamw_cases())
    for (double garbage : {double(NAN), 1e30}) {
      Workspace w(device());
      const Values control = {3e-3, 0.1, 0.05, NAN, 0, NAN};
      const auto [control_tensor, gradient, master, m, v, weight] =
          make_tensors(w, c, control, Values(size_t(c.count), garbage));
      const std::vector<Values> before = {w.read(master), w.read(m), w.read(v), w.read(weight)};
      w.run([&, &control_tensor = control_tensor, &gradient = gradient, &master = master, &m = m, &v = v,
             &weight = weight] { ops().adamw(kConstants, control_tensor, gradient, master, m, v, weight); });
      EXPECT_EQ((std::vector<Values>{w.read(master), w.read(m), w.read(v), w.read(weight)}), before) << c.count;
    }
}

// The sharded optimizer updates slices: cutting anywhere must give the same bits as one call.
TEST_P(OptimizerTest, AdamwIsIndependentOfTheSlicing) {
  const Values control = {3e-3, 0.1, 0.05, 1, 1, 1};
  const AdamwCase c{1003, DType::bf16, DType::f32, DType::bf16, false};
  const auto update = [&](const Indices& cuts) {
    Workspace w(device());
    const AdamwTensors t = make_tensors(w, c, control, normal_values(c.count, 1, 0, 1e-2));
    w.run([&] {
      for (size_t i = 0; i + 1 < cuts.size(); ++i) {
        const auto part = [&](const Tensor& all) { return all.slice(cuts[i], cuts[i + 1] - cuts[i]); };
        ops().adamw(kConstants, t.control, part(t.gradient), part(t.master), part(t.m), part(t.v), part(t.weight));
      }
    });
    return std::vector<Values>{w.read(t.master), w.read(t.m), w.read(t.v), w.read(t.weight)};
  };
  EXPECT_EQ(update({0, 1003}), update({0, 1, 130, 512, 1000, 1003}));
}

}  // namespace
}  // namespace optimus::test
