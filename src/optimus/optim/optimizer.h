// AdamW over the flat buffers. The f32 master weights are the weights themselves where those are f32, and a copy of
// their own where the compute type is bf16.
#pragma once

#include "optimus/model/context.h"
#include "optimus/optim/config.h"

namespace optimus {

class Optimizer {
 public:
  /// Allocates the state from `persistent`; weights and gradients must outlive the optimizer.
  Optimizer(const OptimizerConfig& config, const ParameterBuffers& parameters, Arena& persistent);

  /// Moments to zero; the master weights are the caller's to fill.
  void reset(Ops& ops);
  /// Sums the squares of all gradients into squares (f64 [1]).
  void add_squares(Ops& ops, Tensor squares) const;
  /// One update of every weight, as `control` says (see ControlSlot).
  void update(Ops& ops, Tensor control) const;

  Tensor master() const { return master_; }
  Tensor first_moment() const { return m_; }
  Tensor second_moment() const { return v_; }

 private:
  /// Neighbours in the flat buffer with the same decay.
  struct Run {
    int64_t begin, count;
    double weight_decay;
  };

  OptimizerConfig config_;
  ParameterBuffers parameters_;
  std::vector<Run> runs_;
  Tensor master_, m_, v_;  // f32 [elements]
};

}  // namespace optimus
