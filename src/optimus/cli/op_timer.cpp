#include "optimus/cli/op_timer.h"

#include <algorithm>
#include <chrono>

#include "optimus/ops/dry/dry_ops.h"

namespace optimus {
namespace {

using Clock = std::chrono::steady_clock;

constexpr int64_t kRotated = int64_t(256) << 20;  // bytes: several times a GPU's second-level cache

}  // namespace

double median(std::vector<double> values) {
  std::nth_element(values.begin(), values.begin() + int64_t(values.size() / 2), values.end());
  return values[values.size() / 2];
}

Tensor Operands::normal(DType dtype, Shape shape, float deviation) {
  const Tensor x = empty(dtype, shape);
  ops_.fill_normal(x.reshape({x.elements()}), deviation, philox_for(1, "bench"), ++streams_, 0);
  return x;
}

Tensor Operands::constant(DType dtype, Shape shape, double value) {
  const Tensor x = empty(dtype, shape);
  ops_.fill(x, value);
  return x;
}

Tensor Operands::indices(Shape shape, const std::vector<int32_t>& values) {
  const Tensor x = empty(DType::i32, shape);
  device_.from_host(x, values.data());
  return x;
}

OpRow OpTimer::time(const std::string& name, const std::string& shape, const Make& make, double work) {
  // A dry set of operands tells how much memory a set takes, and what a call does.
  const auto dry_device = make_dry_device(device_.kind());
  Arena dry_arena(*dry_device, "bench", -1);
  DryOps dry(device_.kind(), deterministic_);
  Operands dry_operands(dry_arena, *dry_device, dry);
  const Call dry_call = make(dry_operands);
  dry.clear();
  dry_call(dry);
  OpRow row{name, shape, 0, 0, 0};
  for (const OpRecord& record : dry.records()) {
    row.flops += record.flops * work;
    row.bytes += record.bytes;
  }

  const int64_t bytes = dry_arena.peak();
  const int64_t copies = std::clamp<int64_t>((kRotated + bytes - 1) / bytes, 1, 16);
  Arena arena(device_, "bench", copies * bytes);
  Operands operands(arena, device_, ops_);
  std::vector<Call> calls;
  for (int64_t i = 0; i < copies; ++i) calls.push_back(make(operands));
  row.seconds = seconds_of(calls);
  return row;
}

double OpTimer::seconds_of(const std::vector<Call>& calls) {
  size_t next = 0;
  const auto run_for = [&](int64_t count) {
    const auto start = Clock::now();
    for (int64_t i = 0; i < count; ++i) calls[next++ % calls.size()](ops_);
    device_.synchronise_wait();
    return std::chrono::duration<double>(Clock::now() - start).count();
  };
  device_.synchronise_wait();
  run_for(std::max<int64_t>(2, int64_t(calls.size())));  // plans are made and memory is touched
  const double once = run_for(3) / 3;
  const double window = gpu() ? 8e-3 : 50e-3;
  const int64_t count = std::clamp<int64_t>(int64_t(window / once), 1, 400);
  std::vector<double> seconds;
  for (int i = 0; i < 7; ++i) seconds.push_back(run_for(count) / double(count));
  return median(seconds);
}

OpRow OpTimer::measure_product() {
  const int64_t n = gpu() ? 8192 : 2048;
  const DType type = gpu() ? DType::bf16 : DType::f32;
  return time("ceiling: product", fmt::format("{} cubed {}", n, name_of(type)), [&](Operands& o) -> Call {
    const Tensor a = o.normal(type, {n, n}), b = o.normal(type, {n, n}), y = o.empty(type, {n, n});
    return [=](Ops& ops) { ops.matmul(a, Transpose::no, b, Transpose::yes, y, {}); };
  });
}

Ceilings OpTimer::measure_ceilings() {
  const auto copy = [&](int64_t elements) {
    return time("ceiling: copy", fmt::format("{} MiB", elements >> 18), [&](Operands& o) -> Call {
      const Tensor a = o.normal(DType::f32, {elements}), b = o.empty(DType::f32, {elements});
      return [=](Ops& ops) { ops.copy(a, b); };
    });
  };
  return {measure_product(), copy(gpu() ? int64_t(1) << 28 : int64_t(1) << 25), copy(int64_t(1) << 20)};
}

}  // namespace optimus
