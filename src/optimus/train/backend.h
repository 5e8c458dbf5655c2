// What a run computes on: the CPU, or one GPU a rank.
#pragma once

#include "optimus/comm/processes.h"
#include "optimus/ops/ops.h"
#include "optimus/train/config.h"

namespace optimus {

/// The device that run.device names: a rank takes the GPU of its number among the machine's ranks. A launcher that shows
/// each rank one GPU only is fine, too. Throws Error(kUsage) with one sentence where that GPU cannot be used.
std::unique_ptr<Device> open_device(const RunConfig& config, const Processes& processes);

/// The kernels of a device that open_device() gave.
std::unique_ptr<Ops> make_ops(const RunConfig& config, Device& device);

}  // namespace optimus
