// What a run computes on: the CPU, or one GPU a rank.
#pragma once

#include "optimus/comm/processes.h"
#include "optimus/ops/ops.h"
#include "optimus/train/config.h"

namespace optimus {

/// The device of that kind for this rank: the GPU of its number among the machine's ranks, or the only one that its launcher
/// shows it. Collective. Throws Error(kUsage) with one sentence, on all ranks, where a rank's GPU cannot be used, two ranks have
/// the same one, or some ranks want GPUs and others the CPU.
std::unique_ptr<Device> open_device(DeviceKind kind, Processes& processes);

/// The kernels of a device that open_device() gave.
std::unique_ptr<Ops> make_ops(const RunConfig& config, Device& device);

}  // namespace optimus
