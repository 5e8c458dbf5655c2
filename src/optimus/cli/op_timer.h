// How kernels are timed: on random operands that rotate over several copies, so that no cache keeps them from call to
// call. A time is the median over repetitions of a run of calls, waited for once at its end. FLOPs and bytes are those that the
// dry backend counts for the same call.
#pragma once

#include <functional>
#include <string>
#include <vector>

#include "optimus/ops/ops.h"
#include "optimus/tensor/arena.h"
#include "optimus/train/config.h"

namespace optimus {

/// Of at least one value; of an even number the upper of the middle two.
double median(std::vector<double> values);

struct OpRow {
  std::string name, shape;
  double seconds, flops, bytes;  ///< of one call
  double flops_per_second() const { return flops / seconds; }
  double bytes_per_second() const { return bytes / seconds; }  ///< read and written
};

/// What the machine can do, measured in this process.
struct Ceilings {
  OpRow product;     ///< 8192 cubed in bf16 on a GPU, 2048 cubed in f32 on a CPU
  OpRow copy;        ///< of much more than caches hold
  OpRow small_copy;  ///< of 4 MiB: what a short kernel can reach at best
};

/// A set of operands of one call, drawn from an arena.
class Operands {
 public:
  Operands(Arena& arena, Device& device, Ops& ops) : arena_(arena), device_(device), ops_(ops) {}

  Tensor normal(DType dtype, Shape shape, float deviation = 1.0f);
  Tensor constant(DType dtype, Shape shape, double value);
  Tensor indices(Shape shape, const std::vector<int32_t>& values);
  Tensor empty(DType dtype, Shape shape) { return arena_.allocate(dtype, shape, "operand"); }
  Ops& ops() { return ops_; }

 private:
  Arena& arena_;
  Device& device_;
  Ops& ops_;
  uint64_t streams_ = 0;
};

class OpTimer {
 public:
  using Call = std::function<void(Ops&)>;
  /// Makes one set of operands and the call on them.
  using Make = std::function<Call(Operands&)>;

  OpTimer(const RunConfig& config, Device& device, Ops& ops)
      : device_(device), ops_(ops), deterministic_(config.run.deterministic) {}

  /// `work` scales the FLOPs that the dry backend counts.
  OpRow time(const std::string& name, const std::string& shape, const Make& make, double work = 1.0);
  OpRow measure_product();
  Ceilings measure_ceilings();

 private:
  double seconds_of(const std::vector<Call>& calls);
  bool gpu() const { return device_.kind() == DeviceKind::cuda; }

  Device& device_;
  Ops& ops_;
  bool deterministic_;
};

}  // namespace optimus
