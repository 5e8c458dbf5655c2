// The update: sum of squares, clip coefficient and finite flag, split masters, AdamW.
#include <bit>

#include "support/backends.h"
#include "support/reference.h"

namespace optimus::test {
namespace {

using OptimizerTest = OpsTest;
OPTIMUS_ON_EVERY_BACKEND(OptimizerTest);

using Indices2 = std::vector<std::pair<int64_t, int64_t>>;

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

// ---- split masters ----

uint32_t bits_of(double value) { return std::bit_cast<uint32_t>(float(value)); }
float float_of(uint32_t bits) { return std::bit_cast<float>(bits); }
double bf16_of(uint32_t bits) { return double(float_of(bits << 16)); }

/// Every pattern that a f32 can split into: ties and their neighbours, subnormal numbers, the largest, infinities.
Values masters_to_split() {
  Values out = {0x1p-149, double(INFINITY), -double(INFINITY)};
  for (uint32_t upper : {0x0000u, 0x0001u, 0x007Fu, 0x0080u, 0x3F7Fu, 0x3F80u, 0x3F81u, 0x4049u, 0x7F7Eu, 0x7F7Fu})
    for (uint32_t lower : {0x0000u, 0x0001u, 0x1234u, 0x7FFEu, 0x7FFFu, 0x8000u, 0x8001u, 0xABCDu, 0xFFFEu, 0xFFFFu})
      for (uint32_t sign : {0x00000000u, 0x80000000u}) out.push_back(double(float_of(sign | upper << 16 | lower)));
  for (double value : normal_values(2000, 1)) out.push_back(double(float(value)));
  return out;
}

/// What split_master() makes of them.
struct SplitValues {
  Values weight, remainder;
};
SplitValues split_values(const Values& masters) {
  SplitValues out;
  for (double value : masters) {
    const uint32_t bits = bits_of(value), weight = (bits + 0x8000u) >> 16;
    out.weight.push_back(bf16_of(weight));
    out.remainder.push_back(double(int64_t(bits) - (int64_t(weight) << 16)));
  }
  return out;
}
Values joined_values(const Values& weight, const Values& remainder) {
  Values out;
  for (size_t i = 0; i < weight.size(); ++i)
    out.push_back(double(float_of(uint32_t(int64_t(bits_of(weight[i])) + int64_t(remainder[i])))));
  return out;
}

/// Values by their bits: 0 and -0 differ.
std::vector<uint32_t> all_bits(const Values& values) {
  std::vector<uint32_t> out;
  for (double value : values) out.push_back(bits_of(value));
  return out;
}

TEST_P(OptimizerTest, SplitMasterKeepsEveryBit) {
  const Values all = masters_to_split();
  const int64_t size = int64_t(all.size());
  for (const auto& [first, count] : Indices2{{0, size}, {0, 0}, {5, 1}, {17, 7}, {100, 1003}}) {
    const Values masters(all.begin() + first, all.begin() + first + count);
    Workspace w(device());
    const Tensor master = w.input(DType::f32, {count}, masters), again = w.output(DType::f32, {count});
    const Tensor weight = w.output(DType::bf16, {count}), remainder = w.output(DType::i16, {count});
    w.run([&] {
      ops().split_master(master, weight, remainder);
      ops().join_master(weight, remainder, again);
    });
    const SplitValues expected = split_values(masters);
    EXPECT_EQ(all_bits(w.read(weight)), all_bits(expected.weight));
    EXPECT_EQ(w.read(remainder), expected.remainder);
    for (double value : w.read(remainder)) EXPECT_TRUE(value >= -0x8000 && value <= 0x7FFF) << value;
    EXPECT_EQ(all_bits(w.read(again)), all_bits(masters));
  }
}

// Operands that begin anywhere.
TEST_P(OptimizerTest, SplitMasterOfSlices) {
  const int64_t count = 203;
  for (const auto& [a, b] : Indices2{{1, 1}, {3, 3}, {0, 1}, {2, 5}}) {
    Workspace w(device());
    const Tensor master = w.input(DType::f32, {count}, normal_values(count, 1)).slice(a, 190);
    const Tensor again = w.output(DType::f32, {count}), weight = w.output(DType::bf16, {count});
    const Tensor remainder = w.output(DType::i16, {count});
    w.run([&, a = a, b = b] {
      ops().split_master(master, weight.slice(b, 190), remainder.slice(a, 190));
      ops().join_master(weight.slice(b, 190), remainder.slice(a, 190), again.slice(b, 190));
    });
    EXPECT_EQ(w.read(again.slice(b, 190)), w.read(master)) << a << " " << b;
    EXPECT_TRUE(w.untouched(again.slice(0, b)) && w.untouched(weight.slice(0, b)) &&
                w.untouched(remainder.slice(0, a)));
    EXPECT_TRUE(w.untouched(again.slice(b + 190, count - b - 190)));
    EXPECT_TRUE(w.untouched(remainder.slice(a + 190, count - a - 190)));
  }
}

// ---- AdamW ----

struct AdamwCase {
  int64_t count;
  DType gradient, moments;
  bool split;  ///< a bf16 weight and a remainder, else a f32 weight
};
std::string text(const AdamwCase& c) {
  return fmt::format("{} gradient {} moments {} {}", c.count, name_of(c.gradient), name_of(c.moments),
                     c.split ? "split master" : "in place");
}

std::vector<AdamwCase> adamw_cases(const Indices& counts) {
  std::vector<AdamwCase> out;
  for (int64_t count : counts)
    for (DType gradient : {DType::f32, DType::bf16})
      for (DType moments : {DType::f32, DType::bf16})
        for (bool split : {false, true}) out.push_back({count, gradient, moments, split});
  return out;
}

struct AdamwTensors {
  Tensor control, gradient, master, m, v, weight;

  AdamwTensors slice(int64_t first, int64_t count) const {
    const auto part = [&](const Tensor& all) { return all.slice(first, count); };
    return {control, part(gradient), part(master), part(m), part(v), part(weight)};
  }
};
AdamwTensors make_tensors(Workspace& w, const AdamwCase& c, const Values& control, const Values& gradient) {
  const Shape shape{c.count};
  Values v = normal_values(c.count, 4, 0, 1e-2);
  for (double& value : v) value *= value;
  const Values masters = normal_values(c.count, 2);
  AdamwTensors out{w.input(DType::f32, {kControlSize}, control),
                   w.input(c.gradient, shape, gradient),
                   {},
                   w.in_out(c.moments, shape, normal_values(c.count, 3, 0, 1e-2)),
                   w.in_out(c.moments, shape, v),
                   {}};
  if (c.split) {
    const SplitValues split = split_values(masters);
    out.weight = w.in_out(DType::bf16, shape, split.weight);
    out.master = w.in_out(DType::i16, shape, split.remainder);
  } else {
    out.weight = out.master = w.in_out(DType::f32, shape, masters);
  }
  return out;
}
Values masters_of(const Workspace& w, const AdamwTensors& t) {
  return t.weight.dtype == DType::f32 ? w.read(t.weight) : joined_values(w.read(t.weight), w.read(t.master));
}
void run_adamw(Ops& ops, const AdamwConstants& constants, const AdamwTensors& t) {
  ops.adamw(constants, t.control, t.gradient, t.master, t.m, t.v, t.weight);
}

TEST_P(OptimizerTest, AdamwMatchesReference) {
  const Values control = {3e-3, 1 - std::pow(0.9, 3), 1 - std::pow(0.95, 3), 0.6, 1, 2};
  for (const AdamwCase& c : adamw_cases({0, 1, 7, 8, 1003, 40000})) {
    SCOPED_TRACE(text(c));
    Workspace w(device());
    const AdamwTensors t = make_tensors(w, c, control, normal_values(c.count, 1, 0, 1e-2));
    const Values before = masters_of(w, t);
    reference::AdamwState expected{before, w.read(t.m), w.read(t.v)};
    reference::adamw(kConstants, {control[kLearningRate], control[kCorrection1], control[kCorrection2], control[kClip]},
                     w.read(t.gradient), expected);
    w.run([&] { run_adamw(ops(), kConstants, t); });
    EXPECT_TRUE(close(w.read(t.m), expected.m, tolerance_of(c.moments))) << "m";
    EXPECT_TRUE(close(w.read(t.v), expected.v, tolerance_of(c.moments))) << "v";
    const Values masters = masters_of(w, t);
    EXPECT_TRUE(close(masters, expected.master, 1e-6)) << "master";
    Values step = masters, expected_step = expected.master;
    for (size_t i = 0; i < before.size(); ++i) step[i] -= before[i], expected_step[i] -= before[i];
    EXPECT_TRUE(close(step, expected_step, 1e-4)) << "the update itself";
    if (c.split) {
      EXPECT_EQ(w.read(t.weight), split_values(masters).weight) << "weight is not the rounded master";
    }
  }
}

// The f32 moments that the same update gives, rounded by the formula of ops.h.
TEST_P(OptimizerTest, AdamwRoundsBf16MomentsByItsRandomWords) {
  const Values control = {3e-3, 0.1, 0.05, 0.7, 1, 1};
  for (const AdamwCase& c : adamw_cases({1, 2, 3, 1003}))
    for (int64_t first : {int64_t(0), int64_t(3), (int64_t(1) << 33) + 1}) {
      if (c.moments != DType::bf16) continue;
      SCOPED_TRACE(fmt::format("{} from {}", text(c), first));
      AdamwConstants constants = kConstants;
      constants.rounding = {0x01234567u, 0x89ABCDEFu};
      constants.step = 11;
      constants.first_index = first;
      const Values gradient = normal_values(c.count, 1, 0, 1e-2);
      Workspace w(device());
      const AdamwTensors t = make_tensors(w, c, control, gradient);
      AdamwTensors exact = make_tensors(w, c, control, gradient);
      exact.m = w.in_out(DType::f32, {c.count}, w.read(t.m));
      exact.v = w.in_out(DType::f32, {c.count}, w.read(t.v));
      w.run([&] {
        run_adamw(ops(), constants, t);
        run_adamw(ops(), constants, exact);
      });
      const Values m = w.read(exact.m), v = w.read(exact.v);
      Values expected_m, expected_v;
      for (int64_t i = 0; i < c.count; ++i) {
        uint32_t words[4];
        constants.rounding(uint64_t(first + i) / 4, constants.step, words);
        const uint32_t word = words[(first + i) % 4];
        expected_m.push_back(bf16_of((bits_of(m[size_t(i)]) + (word & 0xFFFFu)) >> 16));
        expected_v.push_back(bf16_of((bits_of(v[size_t(i)]) + (word >> 16)) >> 16));
      }
      EXPECT_EQ(w.read(t.m), expected_m);
      EXPECT_EQ(w.read(t.v), expected_v);
      EXPECT_EQ(masters_of(w, t), masters_of(w, exact)) << "the update takes the moments before they are rounded";
    }
}

// Moments decay by 0.1 % a step, less than half of bf16's spacing: rounding to nearest would hold them where they are.
// Stochastic rounding moves their mean as it should, within five standard deviations.
TEST_P(OptimizerTest, AdamwRoundingIsUnbiased) {
  const int64_t count = 40000;
  AdamwConstants constants{0.999f, 0.999f, 1e-8f, 0.0f};
  constants.rounding = {7, 8};
  Workspace w(device());
  const Tensor control = w.input(DType::f32, {kControlSize}, {1e-3, 1, 1, 1, 1, 1});
  const Tensor gradient = w.input(DType::f32, {count}, Values(size_t(count), 0.0));
  const Tensor weight = w.in_out(DType::f32, {count}, Values(size_t(count), 1.0));
  const Tensor m = w.in_out(DType::bf16, {count}, Values(size_t(count), -1.5));
  const Tensor v = w.in_out(DType::bf16, {count}, Values(size_t(count), 1.5));
  w.run([&] { ops().adamw(constants, control, gradient, weight, m, v, weight); });
  const double low = 1.5 - 0x1p-7, share = 1.5 * 0.001 / 0x1p-7,
               deviation = std::sqrt(share * (1 - share) / double(count));
  double low_m = 0, low_v = 0, both = 0;
  const Values all_m = w.read(m), all_v = w.read(v);
  for (size_t i = 0; i < all_m.size(); ++i) {
    ASSERT_TRUE((all_m[i] == -1.5 || all_m[i] == -low) && (all_v[i] == 1.5 || all_v[i] == low)) << i;
    low_m += all_m[i] == -low, low_v += all_v[i] == low, both += all_m[i] == -low && all_v[i] == low;
  }
  EXPECT_NEAR(low_m / double(count), share, 5 * deviation);
  EXPECT_NEAR(low_v / double(count), share, 5 * deviation);
  EXPECT_NEAR(both / double(count), share * share, 5 * share / std::sqrt(double(count))) << "m and v are independent";
}

// A step with a loss or gradient that is not finite leaves everything as it is, whatever the gradient holds.
TEST_P(OptimizerTest, AdamwDoesNothingWithoutTheFiniteFlag) {
  for (const AdamwCase& c : adamw_cases({0, 1, 7, 1003}))
    for (double garbage : {double(NAN), 1e30}) {
      Workspace w(device());
      const Values control = {3e-3, 0.1, 0.05, NAN, 0, NAN};
      const AdamwTensors t = make_tensors(w, c, control, Values(size_t(c.count), garbage));
      const std::vector<Values> before = {w.read(t.master), w.read(t.m), w.read(t.v), w.read(t.weight)};
      w.run([&] { run_adamw(ops(), kConstants, t); });
      EXPECT_EQ((std::vector<Values>{w.read(t.master), w.read(t.m), w.read(t.v), w.read(t.weight)}), before) << text(c);
    }
}

// The sharded optimizer updates slices: cutting anywhere must give the same bits as one call.
TEST_P(OptimizerTest, AdamwIsIndependentOfTheSlicing) {
  const Values control = {3e-3, 0.1, 0.05, 1, 1, 1};
  for (const AdamwCase& c : adamw_cases({1003})) {
    SCOPED_TRACE(text(c));
    const auto update = [&](const Indices& cuts) {
      Workspace w(device());
      const AdamwTensors t = make_tensors(w, c, control, normal_values(c.count, 1, 0, 1e-2));
      w.run([&] {
        for (size_t i = 0; i + 1 < cuts.size(); ++i) {
          AdamwConstants constants = kConstants;
          constants.rounding = {1, 2};
          constants.first_index = 5 + cuts[i];
          run_adamw(ops(), constants, t.slice(cuts[i], cuts[i + 1] - cuts[i]));
        }
      });
      return std::vector<Values>{w.read(t.master), w.read(t.m), w.read(t.v), w.read(t.weight)};
    };
    EXPECT_EQ(update({0, 1003}), update({0, 1, 130, 512, 1000, 1003}));
  }
}

}  // namespace
}  // namespace optimus::test
