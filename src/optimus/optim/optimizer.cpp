#include "optimus/optim/optimizer.h"

namespace optimus {

Optimizer::Optimizer(const OptimizerConfig& config, const ParameterBuffers& parameters, Arena& persistent)
    : config_(config), parameters_(parameters) {
  const ParameterTable& table = *parameters.table;
  for (size_t i = 0; i < table.rows().size(); ++i) {
    const Parameter& row = table.rows()[i];
    const double decay = config.decay == "matrices" && !row.matrix() ? 0.0 : config.weight_decay;
    const int64_t end = i + 1 < table.rows().size() ? table.rows()[i + 1].offset : table.elements();
    if (!runs_.empty() && runs_.back().weight_decay == decay) runs_.back().count = end - runs_.back().begin;
    else runs_.push_back({row.offset, end - row.offset, decay});
  }
  const Shape flat{table.elements()};
  master_ = parameters.weights.dtype == DType::f32 ? parameters.weights
                                                   : persistent.allocate(DType::f32, flat, "master weights");
  m_ = persistent.allocate(DType::f32, flat, "optimizer moments");
  v_ = persistent.allocate(DType::f32, flat, "optimizer moments");
}

void Optimizer::reset(Ops& ops) {
  ops.fill(m_, 0.0);
  ops.fill(v_, 0.0);
}

void Optimizer::add_squares(Ops& ops, Tensor squares) const { ops.sum_squares(parameters_.gradients, squares); }

void Optimizer::update(Ops& ops, Tensor control) const {
  for (const Run& run : runs_) {
    const AdamwConstants constants{float(config_.beta1), float(config_.beta2), float(config_.eps),
                                   float(run.weight_decay)};
    ops.adamw(constants, control, parameters_.gradients.slice(run.begin, run.count),
              master_.slice(run.begin, run.count), m_.slice(run.begin, run.count), v_.slice(run.begin, run.count),
              parameters_.weights.slice(run.begin, run.count));
  }
}

}  // namespace optimus
